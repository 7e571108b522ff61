"""What an inspection takes of a configuration: the architecture and the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from steptron.config.checks import check, data_parallel_size
from steptron.config.loader import with_overrides
from steptron.config.schema import ModelConfig, ParallelConfig, PretrainConfig, Section
from steptron.errors import ConfigError

_LARGEST = 2**31 - 1


class InspectionConfig(Section):
    """The sections that overrides of an inspection can change."""

    model: ModelConfig = Field(description="the architecture")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="layout over processes")


def overridden(model: ModelConfig, overrides: Sequence[str]) -> InspectionConfig:
    """The architecture of some weights and the layout of one process, with overrides applied.

    Raises:
        ConfigError: lists every bad override, key outside ``model`` and ``parallel``, and wrong value.
    """
    return with_overrides(InspectionConfig(model=model), overrides, "the weights' model")


def run_config(inspection: InspectionConfig, precision: str, world_size: int) -> PretrainConfig:
    """A whole configuration that runs every MTP depth, checked for this number of processes.

    Data, optimizer and training have placeholders that fit the layout; nothing of them is used.

    Raises:
        ConfigError: lists what of the model and the layout cannot run.
    """
    model, parallel = inspection.model, inspection.parallel
    unit = math.lcm(2 * parallel.context, parallel.context * parallel.tensor)
    batch = max(1, data_parallel_size(parallel, world_size))
    batch *= parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    config = PretrainConfig.model_validate(
        {
            "model": model,
            "parallel": parallel,
            "loss": {"mtp_train_depths": model.mtp.depths},
            "data": {"train": [{"path": "unused"}], "sequence_length": min(unit * (model.mtp.depths + 1), _LARGEST)},
            "optimizer": {"lr": 1.0},
            "train": {
                "output": ".",
                "steps": 1,
                "global_batch_size": min(batch, _LARGEST),
                "micro_batch_size": 1,
                "precision": precision,
                "logging": {"tensorboard": False},
            },
        }
    )
    problems: list[str] = []
    if parallel.node_size is not None:
        problems.append(
            f"parallel.node_size is {parallel.node_size}, but it says how gradients are added up, and there are none: "
            "leave it out"
        )
    try:
        check(config, world_size)
    except ConfigError as error:
        # Placeholders fit every layout that can run: what is wrong with them follows from something else.
        problems += [problem for problem in error.problems if not problem.startswith(("data.", "train."))]
    if problems:
        plural = "" if world_size == 1 else "es"
        raise ConfigError(f"the model and its layout on {world_size} process{plural}", problems)
    return config
