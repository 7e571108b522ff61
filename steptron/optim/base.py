"""What the training loop needs of an optimizer, and the fp32 weights behind bf16 parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from steptron.optim.owned import OwnedPiece


@dataclass(frozen=True)
class StateTensor:
    """A part of the optimizer's state: of a piece, in the order of its elements."""

    owned: OwnedPiece
    tensor: torch.Tensor


class Optimizer(Protocol):
    """Updates what this process owns from its reduced gradients."""

    def step(self, lr: float) -> None:
        """One update at the given learning rate."""
        ...

    def state(self) -> Mapping[str, Sequence[StateTensor]]:
        """State tensors by kind (such as ``exp_avg``, ``momentum``, ``master``), each as long as its piece; loading a
        checkpoint writes into them in place."""
        ...

    def num_non_finite(self) -> torch.Tensor:
        """Pieces whose last update was not finite and was left out; float64 scalar, on the device.

        None, where finite gradients give finite updates.
        """
        return torch.zeros((), dtype=torch.float64)

    def non_finite(self) -> list[str]:
        """Their names."""
        return []

    @property
    def num_steps(self) -> int:
        """Updates made so far."""
        ...

    def set_num_steps(self, num_steps: int) -> None:
        """Continues from a checkpoint."""
        ...


class MasterWeights:
    """fp32 weights that the optimizer updates; the parameters themselves when those are fp32.

    Attributes:
        weights: [n] for each piece, fp32.
    """

    def __init__(self, owned: Sequence[OwnedPiece]) -> None:
        self._owned = owned
        self.weights = [piece.weight if _is_wide(piece) else piece.weight.float() for piece in owned]

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds updated weights into parameters of a narrower dtype."""
        for piece, weight in zip(self._owned, self.weights, strict=True):
            if not _is_wide(piece):
                piece.weight.copy_(weight)

    def state(self) -> dict[str, list[StateTensor]]:
        """``master`` weights that exist beside the parameters."""
        pairs = zip(self._owned, self.weights, strict=True)
        return {"master": [StateTensor(piece, weight) for piece, weight in pairs if not _is_wide(piece)]}


def _is_wide(piece: OwnedPiece) -> bool:
    return piece.weight.dtype is torch.float32
