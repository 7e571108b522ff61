"""The optimizer that the configuration names."""

from __future__ import annotations

from steptron.config.schema import OptimizerConfig
from steptron.optim.adamw import AdamW
from steptron.optim.base import NamedParameter, Optimizer
from steptron.optim.sgd import Sgd


def build_optimizer(config: OptimizerConfig, parameters: list[NamedParameter]) -> Optimizer:
    """Builds the optimizer over this process's trained parameters."""
    if config.name == "adamw":
        return AdamW(config, parameters)
    return Sgd(config, parameters)
