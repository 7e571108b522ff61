"""Plain gradient descent: linear in the gradient, so that layouts can be compared step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steptron.optim.base import MasterWeights, Optimizer, StateTensor
from steptron.optim.owned import OwnedPiece


class Sgd(Optimizer):
    """w <- w - lr * (gradient + weight_decay * w); no momentum. Decay skips what AdamW's skips."""

    def __init__(self, owned: Sequence[OwnedPiece]) -> None:
        self._master = MasterWeights(owned)
        self._owned = owned
        self._num_steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for piece, weight in zip(self._owned, self._master.weights, strict=True):
            rule = piece.piece.rule
            own = lr * rule.lr_multiplier
            weight.mul_(1 - own * rule.weight_decay)
            weight.sub_(piece.gradient, alpha=own)
        self._master.write_back()
        self._num_steps += 1

    def state(self) -> Mapping[str, Sequence[StateTensor]]:
        return self._master.state()

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
