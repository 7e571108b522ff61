"""How weights fit a model: what they have besides, and what fills the places that they leave open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from steptron.config.schema import InitConfig, InitialWeightsMissingConfig, PretrainConfig
from steptron.errors import ConfigError
from steptron.model.init import initialise
from steptron.model.layer_spec import ModelSpec
from steptron.model.parameter_shards import Place

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Filling:
    """What may fill places that weights leave open.

    Attributes:
        missing: which places, with what.
        init, seed: of what is drawn at random.
    """

    missing: InitialWeightsMissingConfig
    init: InitConfig
    seed: int

    @classmethod
    def of(cls, config: PretrainConfig) -> Filling:
        """What a run's configuration allows."""
        return cls(config.train.initial_weights_missing, config.model.init, config.train.seed)


@dataclass(frozen=True)
class Fit:
    """What weights do not share with a model.

    Attributes:
        dropped: MTP depths that the model does not have, from 0.
        cloned: MTP depths that start as copies of depth 0.
        drawn: parameters that are drawn at random.
    """

    dropped: tuple[int, ...]
    cloned: tuple[int, ...]
    drawn: tuple[str, ...]

    def leaves_open(self, name: str) -> bool:
        """Whether a parameter or logical matrix of the model is not to be read."""
        return name in self.drawn or any(name.startswith(f"mtp.{depth}.") for depth in self.cloned)

    def notes(self) -> list[str]:
        """What is done about it, a line each."""
        notes = []
        if self.dropped:
            notes.append(f"dropped: {_depths(self.dropped)}, which this model does not have")
        if self.cloned:
            notes.append(f"cloned: {_depths(self.cloned)} of this model from MTP depth 1 of the weights")
        return notes + [f"drawn at random: {name}" for name in self.drawn]

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor], spec: ModelSpec, place: Place, filling: Filling | None) -> None:
        """Sets what was not read, once the rest is.

        Args:
            tensors: of this process, by logical name. All MTP depths lie on one stage, and ranks cut them alike.
            spec: the whole model.
            place: which part of each parameter the tensors are.
            filling: what the fit was found with.
        """
        for depth in self.cloned:
            prefix = spec.mtp[depth].prefix
            for parameter in spec.mtp[depth].parameters():
                if parameter.name in tensors:
                    source = f"{spec.mtp[0].prefix}{parameter.name.removeprefix(prefix)}"
                    tensors[parameter.name].copy_(tensors[source])
        if self.drawn and filling is not None:
            own = {name: tensors[name] for name in self.drawn if name in tensors}
            initialise(own, spec, filling.init, filling.seed, place)


def logical_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the logical matrices of a model, by name."""
    return {
        matrix.name: parameter.matrix_shape(matrix) for parameter in spec.parameters() for matrix in parameter.matrices
    }


def fit(path: Path, stored: Shapes, spec: ModelSpec, filling: Filling | None) -> Fit:
    """Compares weights with a model.

    Weights may have MTP depths that the model does not have, and output matrices of depths that share the main one.

    Args:
        path: the weights, for the message.
        stored: shapes of their logical matrices.
        spec: the model.
        filling: what may fill what they do not have; nothing when None.

    Raises:
        ConfigError: lists every tensor that is missing, has another shape, or is not part of the model.
    """
    needed = logical_shapes(spec)
    depths = sorted({int(name.split(".")[1]) for name in stored if name.startswith("mtp.")})
    lacking = tuple(depth for depth in range(len(spec.mtp)) if depth not in depths)
    head = tuple(parameter.name for parameter in spec.value_head_parameters() if parameter.name not in stored)
    problems: list[str] = []
    if lacking and (not depths or filling is None or filling.missing.mtp == "refuse"):
        problems.append(_no_depths(lacking, depths))
    if head and (filling is None or filling.missing.value_head == "refuse"):
        problems += [
            f"{name} {list(needed[name])} is not there: set train.initial_weights_missing.value_head to initialise to "
            "draw it at random, or model.value_head to false"
            for name in head
        ]
    found = Fit(tuple(depth for depth in depths if depth >= len(spec.mtp)), lacking, head)
    for name, shape in needed.items():
        if found.leaves_open(name):
            continue
        if name not in stored:
            problems.append(f"{name} {list(shape)} is not there")
        elif stored[name] != shape:
            problems.append(f"{name} has shape {list(stored[name])}, the model needs {list(shape)}")
    problems += [
        f"{name} {list(shape)} is not part of this model"
        for name, shape in stored.items()
        if name not in needed and not name.startswith("mtp.")
    ]
    if problems:
        raise ConfigError(f"the weights in {path} do not fit this model", problems)
    return found


def _no_depths(lacking: tuple[int, ...], depths: list[int]) -> str:
    verb = "is" if len(lacking) == 1 else "are"
    missing = f"{_depths(lacking)} ({', '.join(f'mtp.{depth}' for depth in lacking)}) {verb} not there"
    if not depths:
        return f"{missing}, nor any other that could be cloned: set model.mtp.depths to 0"
    return (
        f"{missing}: set train.initial_weights_missing.mtp to clone to start from copies of depth 1, or "
        f"model.mtp.depths to {len(depths)}"
    )


def _depths(numbers: tuple[int, ...]) -> str:
    """As people count them, from 1."""
    listed = [str(number + 1) for number in numbers]
    if len(listed) == 1:
        return f"MTP depth {listed[0]}"
    return f"MTP depths {', '.join(listed[:-1])} and {listed[-1]}"
