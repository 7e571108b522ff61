"""What of the parameters this process updates: views of gradients and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steptron.optim.buffer_plan import Piece


@dataclass(frozen=True)
class OwnedPiece:
    """A piece that this process updates.

    Attributes:
        piece: what it is, and by which rule it is updated.
        weight: [n], view of the parameter in its dtype.
        gradient: [n], view of the reduced fp32 gradient, whole when the optimizer steps.
        is_copy: another pipeline stage has the piece too and updates it alike.
    """

    piece: Piece
    weight: torch.Tensor
    gradient: torch.Tensor
    is_copy: bool = False

    @property
    def name(self) -> str:
        return self.piece.name
