"""The places of a model whose values a trace records, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from steptron.errors import ConfigError
from steptron.model.layer_spec import LayerSpec, ModelSpec, MoeFfnSpec

Read = Callable[[Any, Any], torch.Tensor]
"""(the module's first input, its output) -> the value."""


@dataclass(frozen=True)
class Site:
    """A named value of the forward pass.

    Attributes:
        name: its name in a trace.
        module: path of the module that reads or makes it; None for logits, which no module makes.
        read: takes it from the module's first input and output.
    """

    name: str
    module: str | None
    read: Read


def sites(spec: ModelSpec) -> list[Site]:
    """Every site of a model, in the order of the forward pass."""
    found = [Site("embedding", "embedding", _output)]
    for layer in spec.layers:
        found += _layer_sites(layer)
    found += [Site("final_norm.output", "final_norm", _output), Site("logits", None, _output)]
    for depth in spec.mtp:
        prefix = depth.prefix
        found += [
            Site(f"{prefix}.{name}.output", f"{prefix}.{name}", _output)
            for name in ("embedding_norm", "hidden_norm", "projection")
        ]
        found += _layer_sites(depth.layer)
        found += [
            Site(f"{prefix}.final_norm.output", f"{prefix}.final_norm", _output),
            Site(f"{prefix}.logits", None, _output),
        ]
    return found


def _layer_sites(layer: LayerSpec) -> list[Site]:
    attention, ffn, router = (f"{layer.prefix}.{name}" for name in ("attention", "ffn", "ffn.router"))
    moe = [
        Site(f"{router}.scores", router, lambda _, routing: routing.scores_TE),
        Site(f"{router}.experts", router, lambda _, routing: ascending(routing.experts_TK)[0]),
        Site(
            f"{router}.weights",
            router,
            lambda _, routing: routing.weights_TK.gather(1, ascending(routing.experts_TK)[1]),
        ),
        Site(f"{ffn}.shared.output", f"{ffn}.shared", _output),
    ]
    return [
        Site(f"{attention}.input", attention, _input),
        Site(f"{attention}.output", attention, _output),
        Site(f"{ffn}.input", ffn, _input),
        *(moe if isinstance(layer.ffn, MoeFfnSpec) else []),
        Site(f"{ffn}.output", ffn, _output),
        Site(f"{layer.prefix}.output", layer.prefix, _output),
    ]


def ascending(experts_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's experts in ascending order, and where each was; routers select in no particular order."""
    ordered = experts_TK.sort(dim=1)
    return ordered.values, ordered.indices


def choose(available: Sequence[Site], patterns: Sequence[str]) -> list[Site]:
    """The sites that any of the patterns (``layers.3.*``) names; all without patterns.

    Raises:
        ConfigError: lists the patterns that name none.
    """
    if not patterns:
        return list(available)
    idle = [pattern for pattern in patterns if not any(fnmatchcase(site.name, pattern) for site in available)]
    if idle:
        names = f"{available[0].name}, {available[1].name}, ..., {available[-1].name}"
        raise ConfigError("--only", [f"{pattern} names no site of this model: it has {names}" for pattern in idle])
    return [site for site in available if any(fnmatchcase(site.name, pattern) for pattern in patterns)]


def _input(first: Any, _: Any) -> torch.Tensor:
    value: torch.Tensor = first
    return value


def _output(_: Any, output: Any) -> torch.Tensor:
    value: torch.Tensor = output
    return value
