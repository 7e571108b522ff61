"""AdamW, on torch's fused implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steptron.config.schema import OptimizerConfig
from steptron.optim.base import MasterWeights, Optimizer, StateTensor
from steptron.optim.owned import OwnedPiece
from steptron.optim.rules import Rule
from steptron_kernels.packed_weights import weights_changed


class AdamW(Optimizer):
    """AdamW with decoupled weight decay (arXiv 1711.05101) on fp32 weights."""

    def __init__(self, config: OptimizerConfig, owned: Sequence[OwnedPiece]) -> None:
        self._master = MasterWeights(owned)
        self._owned = owned
        by_rule: dict[Rule, list[torch.Tensor]] = {}
        for piece, weight in zip(owned, self._master.weights, strict=True):
            by_rule.setdefault(piece.piece.rule, []).append(weight)
        # A rank may own nothing; torch wants at least a group.
        self._engine = torch.optim.AdamW(
            [
                {"params": weights, "weight_decay": rule.weight_decay, "lr_multiplier": rule.lr_multiplier}
                for rule, weights in by_rule.items()
            ]
            or [{"params": [], "lr_multiplier": 1.0}],
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
            group["lr"] = lr * group["lr_multiplier"]
        for piece, weight in zip(self._owned, self._master.weights, strict=True):
            weight.grad = piece.gradient
        self._engine.step()
        self._num_steps += 1
        weights_changed(self._master.weights)
        self._master.write_back()

    def state(self) -> Mapping[str, Sequence[StateTensor]]:
        states: dict[str, list[StateTensor]] = {"exp_avg": [], "exp_avg_sq": []}
        for piece, weight in zip(self._owned, self._master.weights, strict=True):
            for kind, tensors in states.items():
                tensors.append(StateTensor(piece, self._engine.state[weight][kind]))
        return states | self._master.state()

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        for state in self._engine.state.values():
            state["step"].fill_(num_steps)
