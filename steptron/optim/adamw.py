"""AdamW, on torch's fused implementation."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from steptron.config.schema import OptimizerConfig
from steptron.optim.base import MasterWeights, NamedParameter, weight_decay
from steptron_kernels.packed_weights import weights_changed


class AdamW:
    """AdamW with decoupled weight decay (arXiv 1711.05101) on fp32 weights."""

    def __init__(self, config: OptimizerConfig, parameters: list[NamedParameter]) -> None:
        self._master = MasterWeights(parameters)
        self._parameters = parameters
        groups: dict[float, list[torch.Tensor]] = {}
        for parameter, weight in zip(parameters, self._master.weights, strict=True):
            groups.setdefault(weight_decay(config, parameter.spec.role), []).append(weight)
        # A pipeline stage may be empty; torch wants at least a group.
        self._engine = torch.optim.AdamW(
            [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()] or [{"params": []}],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._num_steps = 0
        # State exists from the start, so that a checkpoint can be loaded before the first step.
        for weight in self._master.weights:
            self._engine.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    def step(self, lr: float) -> None:
        for group in self._engine.param_groups:
            group["lr"] = lr
        for parameter, weight in zip(self._parameters, self._master.weights, strict=True):
            weight.grad = parameter.tensor.main_grad  # type: ignore[attr-defined]
        self._engine.step()
        self._num_steps += 1
        weights_changed(self._master.weights)
        self._master.write_back()

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        states: dict[str, dict[str, torch.Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for parameter, weight in zip(self._parameters, self._master.weights, strict=True):
            for kind, tensors in states.items():
                tensors[parameter.spec.name] = self._engine.state[weight][kind]
        return states | self._master.state()

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        for state in self._engine.state.values():
            state["step"].fill_(num_steps)
