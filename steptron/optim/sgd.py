"""Plain gradient descent: linear in the gradient, so that layouts can be compared step by step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from steptron.config.schema import OptimizerConfig
from steptron.optim.base import MasterWeights, NamedParameter, weight_decay


class Sgd:
    """w <- w - lr * (gradient + weight_decay * w); no momentum. Decay skips what AdamW's skips."""

    def __init__(self, config: OptimizerConfig, parameters: list[NamedParameter]) -> None:
        self._master = MasterWeights(parameters)
        self._parameters = parameters
        self._decays = [weight_decay(config, parameter.spec.role) for parameter in parameters]
        self._num_steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for parameter, weight, decay in zip(self._parameters, self._master.weights, self._decays, strict=True):
            weight.mul_(1 - lr * decay)
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
