"""Probes of the matrices that this rank updates: norms of weights, gradients and updates, and Muon's intermediates.

Each logical matrix (of experts each one) is an item of the metric of its role and layer. What a rank owns of it may be
a part: norms of parts go out as such, and the server puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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

Group = Literal["all", "others", "muon"]
"""Parts that this rank owns, those that Muon does not update, and those that it does and that this rank answers for."""
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


def series_of(metric: str, items: Sequence[Item], combination: Combination) -> list[Series]:
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


@dataclass(frozen=True)
class Plan:
    """What a metric is measured of: parts, and the series that their values make, one after the other.

    Attributes:
        views: what is measured, in rows (:func:`rows_of`), where it is at the same place in every step.
    """

    parts: Sequence[OwnedPart]
    series: Sequence[Series]
    views: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        metric: str,
        parts: Sequence[OwnedPart],
        combination: Combination,
        tensor: Callable[[OwnedPiece], Tensor] | None = None,
    ) -> Plan:
        """``tensor``: of a piece, what is measured, at the same place in every step; None: it is new in every one."""
        views = rows_of([part.of(tensor(part.piece)) for part in parts]) if tensor is not None else ()
        return cls(parts, series_of(metric, [part.item for part in parts], combination), views)


def rows_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views [n, size] of vectors, in their order: those of one size that lie at equal distances, as the matrices of a
    parameter's experts do, are rows of one, so that one operation does for all of them."""
    rows: list[Tensor] = []
    distance = 0
    for vector in tensors:
        last = rows[-1] if rows else None
        if last is not None and _same_kind(last, vector):
            step = int(vector.storage_offset() - last.storage_offset()) - (len(last) - 1) * distance
            if step >= vector.numel() and (len(last) == 1 or step == distance):
                distance = step
                shape = (len(last) + 1, vector.numel())
                rows[-1] = last.as_strided(shape, (step, 1), last.storage_offset())
                continue
        rows.append(vector[None])
        distance = 0
    return rows


def _same_kind(rows: Tensor, vector: Tensor) -> bool:
    same_storage = rows.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
    return same_storage and rows.dtype == vector.dtype and rows.shape[1] == vector.numel() and vector.is_contiguous()


def norms_of(rows: Sequence[Tensor]) -> Tensor:
    """fp32, one for each row of all tensors [n, size]; infinite where it is not finite, since NaN stands for what was
    not measured."""
    if not rows:
        return torch.empty(0)
    norms = [torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float32) for vectors in rows]
    return torch.cat(norms).nan_to_num(nan=torch.inf, posinf=torch.inf)


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
        parts = owned_parts(owned, spec)
        self._optimizer = optimizer
        self._muon = muon_of(optimizer)
        self._answers_for_cut = answers_for_cut
        by_muon = {id(piece) for piece in self._muon.owned} if self._muon is not None else set()
        muons = [part for part in parts if id(part.piece) in by_muon]
        self._parts: dict[Group, list[OwnedPart]] = {
            "all": parts,
            "others": [part for part in parts if id(part.piece) not in by_muon],
            "muon": [part for part in muons if answers_for_cut or not is_cut(part.piece)],
        }
        self._experts = [id(part.piece) for part in muons if part.piece.piece.shard.parameter.is_expert]
        self._roles = frozenset(part.item.role for part in parts)
        self._role_of = {id(part.piece): part.item.role for part in muons}
        self._plans: dict[tuple[str, Group, frozenset[str]], Plan] = {}
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
        dotted = self._plan("gradient.dot_weight", "all", Combination.SUM)
        if dotted.parts:
            pairs = ((part.of(part.piece.weight).float(), part.of(part.piece.gradient)) for part in dotted.parts)
            self._measured.append(Measured(dotted.series, torch.stack([torch.dot(*pair) for pair in pairs])))
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
            self._largest |= zip(
                keys, update.largest_N.nan_to_num(nan=torch.inf, posinf=torch.inf).unbind(), strict=True
            )
            if any(self._due.measures("update.norm", role) for role in {self._role_of[key] for key in keys}):
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
            others = self._plan("update.norm", "others", Combination.ROOT_SUM_SQUARES)
            changes = torch._foreach_sub(self._masters(others.parts), self._decayed)
            self._measured.append(Measured(others.series, norms_of([change[None] for change in changes])))
            self._decayed = []
        self._add(self._plan("update.norm", "muon"), self._changes)
        self._add(self._plan("muon.largest", "muon"), self._largest)
        sampled = [part for part in self._parts["muon"] if id(part.piece) in self._ranks]
        self._add(Plan.of("gradient.stable_rank", sampled, Combination.SAMPLES), self._ranks)
        return self._measured

    def _add_norms(self, metric: str, tensor: Callable[[OwnedPiece], Tensor]) -> None:
        plan = self._plan(metric, "all", Combination.ROOT_SUM_SQUARES, tensor)
        if plan.parts:
            self._measured.append(Measured(plan.series, norms_of(plan.views)))

    def _add(self, plan: Plan, values: dict[int, Tensor]) -> None:
        if plan.parts:
            self._measured.append(Measured(plan.series, torch.stack([values[id(part.piece)] for part in plan.parts])))

    def _plan(
        self,
        metric: str,
        group: Group,
        combination: Combination = Combination.SAMPLES,
        tensor: Callable[[OwnedPiece], Tensor] | None = None,
    ) -> Plan:
        """What a metric is measured of in this step; made once for all steps that measure the same roles."""
        due = self._due
        assert due is not None
        roles = frozenset(role for role in self._roles if due.measures(metric, role))
        key = (metric, group, roles)
        if key not in self._plans:
            parts = [part for part in self._parts[group] if part.item.role in roles]
            self._plans[key] = Plan.of(metric, parts, combination, tensor)
        return self._plans[key]

    def _decayed_weights(self, lr: float) -> list[Tensor]:
        """What weight decay alone will make of the weights that Muon does not update."""
        parts = self._plan("update.norm", "others", Combination.ROOT_SUM_SQUARES).parts
        if not parts:
            return []
        rules = [part.piece.piece.rule for part in parts]
        factors = [1 - lr * rule.lr_multiplier * rule.weight_decay for rule in rules]
        return list(torch._foreach_mul(self._masters(parts), factors))

    def _masters(self, parts: Sequence[OwnedPart]) -> list[Tensor]:
        """The fp32 weights of parts."""
        masters = {id(state.owned): state.tensor for state in self._optimizer.state().get("master", ())}
        return [part.of(masters.get(id(part.piece), part.piece.weight)) for part in parts]

    def _turn(self, due: Due) -> frozenset[int]:
        """Experts' projections whose turn it is to have the stable rank of their gradient measured."""
        quantity = due.quantities["gradient.stable_rank"]
        if not self._experts or not due.measures("gradient.stable_rank"):
            return frozenset()
        first = due.step // quantity.every_steps * _SAMPLE
        return frozenset(self._experts[(first + index) % len(self._experts)] for index in range(_SAMPLE))
