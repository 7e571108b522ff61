"""The shapes of the model as it is really built, without memory for its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from steptron.config.schema import ModelConfig, ParallelConfig
from steptron.model.layer_spec import ModelSpec, model_spec

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

Shapes = Mapping[str, tuple[int, ...]]


def built_shapes(model: ModelConfig) -> Shapes:
    """Builds the whole model on the meta device and reads off the shape of every parameter (and of
    the router's selection bias, a buffer), by logical name.

    Needs no other process; a default process group of this one alone is made for the time of the call.

    Raises:
        RuntimeError: this process has a default process group already.
    """
    import torch

    from steptron.platform import megatron_cpu

    if not torch.cuda.is_available():
        megatron_cpu.install()
    from steptron.model.assembly import StepModel
    from steptron.model.stages import Stage
    from steptron.model.transformer_config import transformer_config

    spec, config = model_spec(model), transformer_config(model, ParallelConfig(), torch.float32)
    with _groups_of_one() as groups, torch.device("meta"):
        built = StepModel(spec, Stage.whole(len(spec.layers)), config, groups)
    return {name: tuple(tensor.shape) for name, tensor in built.logical_tensors()}


def check_shapes(spec: ModelSpec, built: Shapes) -> None:
    """Checks that a built model holds exactly the parameters that its specs name.

    Raises:
        ValueError: names every parameter that is missing, unknown or of another shape.
    """
    expected = {parameter.name: parameter.shape for parameter in spec.parameters()}
    problems = [f"{name} {shape} is not built" for name, shape in expected.items() if name not in built]
    problems += [f"{name} {shape} is not in the specs" for name, shape in built.items() if name not in expected]
    problems += [
        f"{name} is built as {built[name]}, the specs say {shape}"
        for name, shape in expected.items()
        if name in built and built[name] != shape
    ]
    if problems:
        raise ValueError("the built model differs from its specs: " + "; ".join(problems))


@contextmanager
def _groups_of_one() -> Iterator[ProcessGroupCollection]:
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    if dist.is_initialized():
        raise RuntimeError(
            "the model on the meta device is built by a process of its own: a process group exists already"
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names = [field.name for field in dataclasses.fields(ProcessGroupCollection)]
        yield ProcessGroupCollection(**dict.fromkeys(names, dist.group.WORLD))
    finally:
        dist.destroy_process_group()
