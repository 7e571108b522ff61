"""Where a forward pass is: which row, and which of its tokens, a process has in hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steptron.parallel.mesh import Mesh
from steptron.parallel.sequence_shard import SequenceShard

NO_TOKEN = -1
"""Stands in values that :meth:`Cursor.take` returns for tokens that no row has."""


@dataclass
class Cursor:
    """Set before each micro-batch, which is one row; hooks read it.

    Attributes:
        own_places_T: int64, places in the (padded) row of the tokens of this process's hidden states, in their order:
            its run of the context-parallel share, with sequence parallelism.
        shard_places_T: those of the whole context-parallel share.
        row: number of the row; None in a row that only keeps other processes company.
    """

    own_places_T: torch.Tensor
    shard_places_T: torch.Tensor
    row: int | None = None

    @classmethod
    def on(cls, mesh: Mesh, length: int) -> Cursor:
        """For a place in a layout and rows of ``length`` tokens, padding included."""
        shard = SequenceShard.balanced(length, mesh.context_rank, mesh.context_size)
        places_T = shard.take(torch.arange(length).unsqueeze(0)).squeeze(0)
        return cls(places_T.chunk(mesh.tensor_size)[mesh.tensor_rank], places_T)

    @classmethod
    def whole(cls, length: int) -> Cursor:
        """For one process."""
        return cls(torch.arange(length), torch.arange(length))

    def take(self, values_BSx: torch.Tensor) -> torch.Tensor:
        """Of whole-number values for every token, those [T, ...] of the tokens in hand; ``NO_TOKEN`` for padding."""
        taken = values_BSx.new_full((len(self.own_places_T), *values_BSx.shape[2:]), NO_TOKEN)
        if self.row is not None:
            inside_T = self.own_places_T < values_BSx.shape[1]
            taken[inside_T] = values_BSx[self.row, self.own_places_T[inside_T]]
        return taken
