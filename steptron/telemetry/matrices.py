"""Probes of the matrices that this rank updates: norms of weights, gradients and updates, and Muon's intermediates.

Each logical matrix (of experts each one) is an item of the metric of its role and layer. What a rank owns of it may be
a part: norms of parts go out as such, and the server puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steptron.model.layer_spec import ModelSpec, ParameterRole
from steptron.model.parameter_shards import held_matrices
from steptron.optim.base import Optimizer
from steptron.optim.diagnostics import is_cut, muon_of, stable_rank
from steptron.optim.muon import Update
from steptron.optim.owned import OwnedPiece
from steptron.telemetry.frame import Measured
from steptron.telemetry.quantities import Due
from steptron_metrics.protocol.description import Combination, Series

_SAMPLE = 8
"""Projections of experts whose gradients' stable ranks are measured at once; it takes eigenvalues."""


@dataclass(frozen=True, order=True)
class Item:
    """A logical matrix as the metrics count it.

    Attributes:
        role: its role's name.
        layer: of the decoder from 0, MTP depths behind them; -1 outside.
        item: number of the expert; of other matrices, place among those of its role in the layer.
    """

    role: str
    layer: int
    item: int


@dataclass(frozen=True)
class OwnedPart:
    """What a rank owns of a logical matrix: elements [start, stop) of a piece."""

    item: Item
    piece: OwnedPiece
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part's elements of a tensor [n] of the piece."""
        return tensor[self.start : self.stop]


def items_of(spec: ModelSpec) -> dict[str, Item]:
    """Every logical matrix of a model by name; of experts the first one."""
    scopes = [(layer.index, layer.parameters()) for layer in spec.layers]
    scopes += [(len(spec.layers) + number, depth.parameters()) for number, depth in enumerate(spec.mtp)]
    named = {parameter.name for _, parameters in scopes for parameter in parameters}
    scopes.append((-1, [parameter for parameter in spec.parameters() if parameter.name not in named]))
    items = {}
    for layer, parameters in scopes:
        numbers: dict[ParameterRole, int] = {}
        for matrix in (matrix for parameter in parameters for matrix in parameter.matrices):
            number = numbers.setdefault(matrix.role, 0)
            numbers[matrix.role] += 1
            items[matrix.name] = Item(matrix.role.value, layer, number)
    return items


def owned_parts(owned: Sequence[OwnedPiece], spec: ModelSpec) -> list[OwnedPart]:
    """Everything that a rank owns, copies on other stages left out, by role, layer and item."""
    items = items_of(spec)
    parts = []
    for piece in owned:
        if piece.is_copy:
            continue
        begin, end = piece.piece.start, piece.piece.stop
        for run in held_matrices(piece.piece.shard):
            start, stop = max(run.start, begin), min(run.stop, end)
            if start < stop:
                item = items[run.part.matrix.name]
                if run.expert is not None:
                    item = replace(item, item=run.expert)
                parts.append(OwnedPart(item, piece, start - begin, stop - begin))
    return sorted(parts, key=lambda part: part.item)


def series_of(metric: str, items: Sequence[Item], combination: Combination = Combination.SAMPLES) -> list[Series]:
    """Series whose values follow each other as sorted, distinct items do."""
    series: list[Series] = []
    for item in items:
        name, last = f"{metric}.{item.role}", series[-1] if series else None
        follows = last is not None and (last.metric, last.layer) == (name, item.layer)
        if last is not None and follows and last.first + last.count == item.item:
            series[-1] = replace(last, count=last.count + 1)
        else:
            series.append(Series(name, item.layer, item.item, 1, combination=combination))
    return series


def norms(metric: str, parts: Sequence[OwnedPart], tensor: Callable[[OwnedPiece], Tensor]) -> Measured:
    """Frobenius norms of what this rank has of matrices."""
    series = series_of(metric, [part.item for part in parts], Combination.ROOT_SUM_SQUARES)
    return Measured(series, norms_of([part.of(tensor(part.piece)) for part in parts]))


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """fp32 [n]; infinite where they are not finite, since NaN stands for what was not measured."""
    if not tensors:
        return torch.empty(0)
    return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32)).nan_to_num(nan=torch.inf)


class MatrixProbes:
    """Looks at an update: what it starts from, how much each matrix changes, and how Muon got there.

    Args:
        spec: the whole model.
        owned: what this rank updates.
        optimizer: updates it.
        answers_for_cut: whether this rank is the first of those that tensor parallelism cuts matrices over.
    """

    def __init__(
        self, spec: ModelSpec, owned: Sequence[OwnedPiece], optimizer: Optimizer, answers_for_cut: bool
    ) -> None:
        self._parts = owned_parts(owned, spec)
        self._optimizer = optimizer
        self._muon = muon_of(optimizer)
        self._answers_for_cut = answers_for_cut
        by_muon = {id(piece) for piece in self._muon.owned} if self._muon is not None else set()
        self._by_muon = [id(part.piece) in by_muon for part in self._parts]
        experts = [part for part, is_own in zip(self._parts, self._by_muon, strict=True) if is_own and _is_expert(part)]
        self._experts = [id(part.piece) for part in experts]
        self._roles = {id(part.piece): part.item.role for part in self._parts}
        self._due: Due | None = None
        self._measured: list[Measured] = []
        self._decayed: list[Tensor] = []
        self._changes: dict[int, Tensor] = {}
        self._largest: dict[int, Tensor] = {}
        self._ranks: dict[int, Tensor] = {}
        self._sampled: frozenset[int] = frozenset()

    @torch.no_grad()
    def before_update(self, due: Due, lr: float) -> None:
        """Once gradients are as the optimizer gets them, before an update at a learning rate."""
        self._due, self._measured = due, []
        self._add_norms("weight.norm", lambda piece: piece.weight)
        self._add_norms("gradient.norm", lambda piece: piece.gradient)
        if dotted := self._of("gradient.dot_weight"):
            products = [torch.dot(part.of(part.piece.weight).float(), part.of(part.piece.gradient)) for part in dotted]
            series = series_of("gradient.dot_weight", [part.item for part in dotted], Combination.SUM)
            self._measured.append(Measured(series, torch.stack(products)))
        self._decayed = self._decayed_weights(lr)
        self._changes, self._largest, self._ranks = {}, {}, {}
        self._sampled = self._turn(due)
        if self._muon is not None:
            self._muon.probes.append(self)

    @torch.no_grad()
    def record(self, update: Update) -> None:
        """What Muon is about to do to some matrices."""
        assert self._due is not None
        keys = [id(piece) for piece in update.pieces]
        if self._answers_for_cut or not is_cut(update.pieces[0]):
            self._largest |= zip(keys, update.largest_N.nan_to_num(nan=torch.inf).unbind(), strict=True)
            if any(self._due.measures("update.norm", role) for role in {self._roles[key] for key in keys}):
                norms_N = torch.linalg.vector_norm(update.o_NRC, dim=(1, 2))
                # A matrix whose iteration was not finite keeps its weights.
                norms_N = norms_N.masked_fill(~update.largest_N.isfinite(), 0.0)
                factors = [rate * scale for rate, scale in zip(update.rates, update.scales, strict=True)]
                self._changes |= zip(keys, (norms_N * norms_N.new_tensor(factors)).unbind(), strict=True)
        for piece in update.pieces:
            if id(piece) in self._sampled:
                self._ranks[id(piece)] = stable_rank(update.whole([piece], [piece.gradient])[0])

    @torch.no_grad()
    def after_update(self) -> list[Measured]:
        """What was seen of this update."""
        assert self._due is not None
        if self._muon is not None:
            self._muon.probes.remove(self)
        if self._decayed:
            others, masters = self._of("update.norm", by_muon=False), self._masters()
            changes = torch._foreach_sub([part.of(masters(part.piece)) for part in others], self._decayed)
            series = series_of("update.norm", [part.item for part in others], Combination.ROOT_SUM_SQUARES)
            self._measured.append(Measured(series, norms_of(changes)))
            self._decayed = []
        self._add("update.norm", self._changes)
        self._add("muon.largest", self._largest)
        self._add("gradient.stable_rank", self._ranks)
        return self._measured

    def _add_norms(self, metric: str, tensor: Callable[[OwnedPiece], Tensor]) -> None:
        if parts := self._of(metric):
            self._measured.append(norms(metric, parts, tensor))

    def _add(self, metric: str, values: dict[int, Tensor]) -> None:
        parts = [part for part in self._of(metric, by_muon=True) if id(part.piece) in values]
        if parts:
            series = series_of(metric, [part.item for part in parts])
            self._measured.append(Measured(series, torch.stack([values[id(part.piece)] for part in parts])))

    def _of(self, metric: str, by_muon: bool | None = None) -> list[OwnedPart]:
        """The parts of which a metric is measured in this step: those that Muon updates, the others, or all."""
        due = self._due
        assert due is not None
        pairs = zip(self._parts, self._by_muon, strict=True)
        wanted = [part for part, is_muons in pairs if by_muon is None or is_muons is by_muon]
        measures = {role: due.measures(metric, role) for role in {part.item.role for part in wanted}}
        return [part for part in wanted if measures[part.item.role]]

    def _decayed_weights(self, lr: float) -> list[Tensor]:
        """What weight decay alone will make of the weights that Muon does not update."""
        masters, decayed = self._masters(), []
        for part in self._of("update.norm", by_muon=False):
            rule = part.piece.piece.rule
            decayed.append(part.of(masters(part.piece)) * (1 - lr * rule.lr_multiplier * rule.weight_decay))
        return decayed

    def _masters(self) -> Callable[[OwnedPiece], Tensor]:
        """The fp32 weights of a piece."""
        masters = {id(state.owned): state.tensor for state in self._optimizer.state().get("master", ())}
        return lambda piece: masters.get(id(piece), piece.weight)

    def _turn(self, due: Due) -> frozenset[int]:
        """Experts' projections whose turn it is to have the stable rank of their gradient measured."""
        quantity = due.quantities["gradient.stable_rank"]
        if not self._experts or not due.measures("gradient.stable_rank"):
            return frozenset()
        first = due.step // quantity.every_steps * _SAMPLE
        return frozenset(self._experts[(first + index) % len(self._experts)] for index in range(_SAMPLE))


def _is_expert(part: OwnedPart) -> bool:
    return part.piece.piece.shard.parameter.is_expert
