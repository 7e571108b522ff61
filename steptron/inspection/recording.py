"""Records values at sites of a forward pass, and puts the parts of all processes together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from steptron.errors import UserError
from steptron.inspection.archive import Array
from steptron.inspection.cursor import Cursor
from steptron.inspection.sites import Site


@dataclass(frozen=True)
class _Piece:
    """What a process holds of a site: the shape of its values [rows, T, ...], and which tokens they are of."""

    rank: int
    rows: tuple[int, ...]
    places: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Recorder:
    """The values of one process: of every row that it met, those of its tokens, in float32 or int64 on the CPU."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._values: dict[str, dict[int, torch.Tensor]] = {}
        self._places: dict[str, torch.Tensor] = {}

    def record(self, name: str, value: torch.Tensor, *, of_shard: bool = False) -> None:
        """Keeps a value of the tokens in hand, unless the row has one already.

        A module may run again in the same row: the embedding, for the tokens that MTP looks ahead to.

        Args:
            name: of the site.
            value: its elements by token, [T, ...], with any axis of extent 1 beside T.
            of_shard: T counts the whole context-parallel share, not this process's run of it.
        """
        row, places_T = self._cursor.row, self._cursor.shard_places_T if of_shard else self._cursor.own_places_T
        rows = self._values.setdefault(name, {})
        if row is None or row in rows:
            return
        self._places[name] = places_T
        dtype = torch.float32 if value.is_floating_point() else torch.int64
        rows[row] = value.detach().reshape(len(places_T), -1).to("cpu", dtype, copy=True)

    @contextmanager
    def listening(self, model: nn.Module, sites: Sequence[Site]) -> Iterator[None]:
        """Within it, modules of the model hand their values over; it may lack some (other pipeline stages' ones)."""
        modules = dict(model.named_modules())
        handles = [
            modules[site.module].register_forward_hook(self._hook(site), with_kwargs=True)
            for site in sites
            if site.module in modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, site: Site) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = args[0] if args else next(iter(kwargs.values()))
            self.record(site.name, site.read(first, output))

        return hook

    def gather(
        self, names: Sequence[str], batch: int, length: int, device: torch.device | None = None
    ) -> Iterator[tuple[str, Array]]:
        """Whole values [batch, length, ...] of all processes, site by site, on rank 0; elsewhere nothing is yielded.

        Every process must go through it to the end.

        Args:
            names: of the sites, the same on every process.
            batch: rows of the run.
            length: tokens of a row, without padding, whose values are left out.
            device: where tensors must lie to be sent; None in one process without a group.

        Raises:
            UserError: a process did not send its part within the group's timeout; the message names it.
            RuntimeError: a token's value is missing, or two processes have one.
        """
        own_rank = dist.get_rank() if dist.is_initialized() else 0
        for name, pieces in self._pieces(names, own_rank).items():
            if own_rank > 0:
                if any(piece.rank == own_rank for piece in pieces):
                    dist.send(self._stacked(name).to(device), dst=0)
                continue
            whole: Array | None = None
            filled = np.zeros((batch, length), dtype=np.int64)
            for piece in pieces:
                part = self._stacked(name) if piece.rank == 0 else _receive(piece, name, device)
                if whole is None:
                    whole = np.empty((batch, length, *part.shape[2:]), dtype=part.numpy().dtype)
                places = np.array(piece.places)
                inside = places < length
                tokens = np.ix_(np.array(piece.rows), places[inside])
                whole[tokens] = part.numpy()[:, inside]
                filled[tokens] += 1
            if whole is None or (filled != 1).any():
                raise RuntimeError(
                    f"{name}: of {filled.size} tokens {int((filled == 0).sum())} were recorded by no process and "
                    f"{int((filled > 1).sum())} by several"
                )
            yield name, whole

    def _pieces(self, names: Sequence[str], own_rank: int) -> Mapping[str, list[_Piece]]:
        """By site, the processes that hold values of it, in the order in which rank 0 hears them."""
        own = {name: self._piece(name, own_rank) for name in names if self._values.get(name)}
        every: list[dict[str, _Piece]] = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            every = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, own)
        return {name: [pieces[name] for pieces in every if name in pieces] for name in names}

    def _piece(self, name: str, rank: int) -> _Piece:
        values, places = self._values[name], tuple(self._places[name].tolist())
        first = next(iter(values.values()))
        return _Piece(rank, tuple(values), places, (len(values), *first.shape), first.dtype)

    def _stacked(self, name: str) -> torch.Tensor:
        """Values [rows, T, ...], which are then let go."""
        return torch.stack(list(self._values.pop(name).values()))


def _receive(piece: _Piece, name: str, device: torch.device | None) -> torch.Tensor:
    part = torch.empty(piece.shape, dtype=piece.dtype, device=device)
    try:
        dist.recv(part, src=piece.rank)
    except RuntimeError as error:
        raise UserError(f"rank {piece.rank} did not send its part of {name}: {error}") from error
    return part.cpu()
