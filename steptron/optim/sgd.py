"""Plain gradient descent: linear in the gradient, so that layouts can be compared step by step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from steptron.config.schema import OptimizerConfig
from steptron.optim.base import MasterWeights, NamedParameter


class Sgd:
    """w <- w - lr * gradient; no momentum, no weight decay."""

    def __init__(self, config: OptimizerConfig, parameters: list[NamedParameter]) -> None:
        self._master = MasterWeights(parameters)
        self._parameters = parameters
        self._num_steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for parameter, weight in zip(self._parameters, self._master.weights, strict=True):
            weight.sub_(parameter.tensor.main_grad, alpha=lr)  # type: ignore[attr-defined]
        self._master.write_back()
        self._num_steps += 1

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return self._master.state()

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
