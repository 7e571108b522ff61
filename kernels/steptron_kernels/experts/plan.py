"""How rows sorted by expert relate to tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowPlan(NamedTuple):
    """N = T K rows, the copies of T tokens at their K experts, sorted by expert.

    Attributes:
        slot_N: int64 [N], which selection each row stands for: token * K + place among the token's experts.
        rows_TK: int64 [T, K], the inverse: the rows of each token.
    """

    slot_N: Tensor
    rows_TK: Tensor

    @property
    def token_N(self) -> Tensor:
        """int64 [N], the token that each row is a copy of."""
        return self.slot_N // self.rows_TK.shape[1]
