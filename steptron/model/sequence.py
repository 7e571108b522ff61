"""What a forward pass knows about its tokens: positions, documents, and its share of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from steptron.model.attention_core import attend
from steptron.parallel.sequence_shard import SequenceShard
from steptron_kernels.select import Kernels

T = TypeVar("T")

PADDING = -1
"""Document number of padding tokens."""


class AttentionContext(Protocol):
    """What attention layers ask about the tokens that they work on."""

    @property
    def own_positions_BS(self) -> torch.Tensor:
        """int64 [B, S], RoPE positions of this process's tokens."""

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Computes a value that several layers need (RoPE tables, masks) once."""

    def attend(
        self,
        q_SBnD: torch.Tensor,
        k_SBgD: torch.Tensor,
        v_SBgD: torch.Tensor,
        window: int | None,
        sink_n: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """Attention of a layer's queries to what they see; :func:`steptron.model.attention_core.attend` says what."""


@dataclass(frozen=True)
class SequenceContext:
    """Positions and documents of the tokens of one micro-batch, shared by all layers.

    S counts the tokens of whole sequences; this process works on those of ``shard``, in their order.

    Attributes:
        positions_BS: int64 [B, S], RoPE positions.
        documents_BS: int64 [B, S], document numbers, non-decreasing along a row before padding;
            ``PADDING`` marks padding. None: every row is one document without padding.
        shard: the tokens that this process holds.
        context_group: the ranks that hold the other tokens, in the order of their ``SequenceShard.balanced``;
            None where ``shard`` is the whole sequence.
    """

    positions_BS: torch.Tensor
    documents_BS: torch.Tensor | None
    shard: SequenceShard
    context_group: dist.ProcessGroup | None = None
    _memo: dict[Hashable, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def own_positions_BS(self) -> torch.Tensor:
        """int64 [B, S], RoPE positions of this process's tokens."""
        return self.shard.take(self.positions_BS)

    def attend(
        self,
        q_SBnD: torch.Tensor,
        k_SBgD: torch.Tensor,
        v_SBgD: torch.Tensor,
        window: int | None,
        sink_n: torch.Tensor | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        """Attention of a layer over the micro-batch's tokens."""
        return attend(q_SBnD, k_SBgD, v_SBgD, self, window, sink_n, kernels.attention)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Computes a value that several layers of the same micro-batch need (RoPE tables, masks) once."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]  # type: ignore[return-value]


def shift_left(values_BS: torch.Tensor, places: int, fill: int | bool) -> torch.Tensor:
    """values[:, t + places] at t; ``fill`` past the end of the row."""
    if places == 0:
        return values_BS
    shifted = torch.full_like(values_BS, fill)
    shifted[:, :-places] = values_BS[:, places:]
    return shifted
