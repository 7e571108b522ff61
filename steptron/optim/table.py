"""Who owns what and updates it by which rule, as tables: short for the console, whole for a file. No torch.

Built from the buffers' plans, that is from what the trainer does, before it allocates anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from steptron.model.layer_spec import ModelSpec, ParameterRole
from steptron.model.parameter_shards import HeldMatrix, MatrixShard, ParameterShard, held_matrices
from steptron.optim.buffer_plan import BufferPlan, Piece
from steptron.optim.ownership import Reduction
from steptron.optim.rules import Algorithm

_FP32 = 4
_MIB = 1 << 20
FROZEN = "frozen"
BIAS_UPDATE = "bias update"
_OPTIMIZERS = (*(algorithm.value for algorithm in Algorithm), BIAS_UPDATE)
_ROLES = tuple(ParameterRole)


@dataclass(frozen=True)
class Row:
    """What one rank owns of one logical matrix (or vector).

    Attributes:
        matrix: its name.
        expert: number of the expert in the whole layer; None for other matrices.
        role: its role.
        optimizer: the algorithm; ``FROZEN`` for what is not trained, ``BIAS_UPDATE`` for selection biases.
        shape: of the whole matrix.
        held: rows or columns that the ranks that share this part hold, such as "rows 0:32"; "all".
        first: the first of them.
        owned: elements of that part, flattened, that the owner updates; all of them, or a run.
        owner: its global rank; None for what has no owner.
        weight_decay, lr_multiplier: of the rule; None for what no optimizer updates.
        reduction: how its gradient is added up; empty without one.
        buffer: which gradient buffer it lies in.
        parameter: the stored parameter that it is a part of.
        is_copy: it is the last pipeline stage's copy of the embedding.
    """

    matrix: str
    expert: int | None
    role: ParameterRole
    optimizer: str
    shape: tuple[int, ...]
    held: str
    first: int
    owned: range
    owner: int | None
    weight_decay: float | None
    lr_multiplier: float | None
    reduction: str
    buffer: str
    parameter: str
    is_copy: bool

    @property
    def name(self) -> str:
        """The matrix; of experts with the expert's number."""
        return self.matrix if self.expert is None else f"{self.matrix}[{self.expert}]"


@dataclass(frozen=True)
class BufferSummary:
    """A gradient buffer in figures.

    Attributes:
        title: what it holds.
        first_rank: global rank of the first of those that share it; tells apart buffers that hold the same.
        ranks: number of ranks that share it.
        reduction: how it is reduced.
        elements: of parameters.
        padding: elements that stand for no parameter.
        scattered_padding: padding that reduce-scattering has or would have, over ``elements``.
        bytes_per_element: of padding, gradient and parameter together.
    """

    title: str
    first_rank: int
    ranks: int
    reduction: Reduction
    elements: int
    padding: int
    scattered_padding: float
    bytes_per_element: int


@dataclass(frozen=True)
class Holding:
    """What one rank, and those that hold the same, know: its rows and its buffers."""

    rows: tuple[Row, ...]
    buffers: tuple[BufferSummary, ...]


def holding(
    plans: Sequence[BufferPlan],
    ranks_by_cell: Mapping[str, Sequence[int]],
    element_size: int,
    untrained: Iterable[ParameterShard] = (),
    embedding_is_copy: bool = False,
    biases_are_updated: bool = True,
) -> Holding:
    """Reads a rank's plans.

    Args:
        plans: its gradient buffers.
        ranks_by_cell: for each group that a plan names, the global rank of each owner.
        element_size: bytes of a parameter's element.
        untrained: its parts of parameters, and of selection biases, that get no gradient.
        embedding_is_copy: it holds the last stage's copy of the embedding.
        biases_are_updated: routers' selection biases follow the load of their experts.
    """
    rows = [
        row
        for plan in plans
        for piece in plan.pieces
        for row in _rows(plan, piece, ranks_by_cell[plan.replicas], embedding_is_copy and plan.is_shared_embedding)
    ]
    for shard in untrained:
        is_bias = shard.parameter.role is ParameterRole.ROUTER_BIAS
        updated_by = BIAS_UPDATE if is_bias and biases_are_updated else FROZEN
        rows += [_without_owner(shard, run, updated_by) for run in held_matrices(shard)]
    buffers = (_summary(plan, min(ranks_by_cell[plan.replicas]), element_size) for plan in plans)
    return Holding(tuple(rows), tuple(buffers))


def merge(holdings: Iterable[Holding]) -> Holding:
    """What several ranks hold together, what they share once."""
    rows: dict[Row, None] = {}
    buffers: dict[BufferSummary, None] = {}
    for part in holdings:
        rows |= dict.fromkeys(part.rows)
        buffers |= dict.fromkeys(part.buffers)
    return Holding(tuple(rows), tuple(buffers))


def in_model_order(rows: Iterable[Row], spec: ModelSpec) -> list[Row]:
    """Sorts by matrix as the model has them, expert, and place in the matrix."""
    matrices = [matrix.name for parameter in spec.parameters() for matrix in parameter.matrices]
    order = {name: number for number, name in enumerate(matrices)}
    return sorted(rows, key=lambda row: (order[row.matrix], row.expert or 0, row.is_copy, row.first, row.owned.start))


def to_tsv(rows: Iterable[Row]) -> str:
    """A head, then a line for each row, with tabs between the columns."""
    head = (
        "matrix",
        "role",
        "optimizer",
        "shape",
        "held",
        "owned",
        "owner",
        "weight_decay",
        "lr_multiplier",
        "reduction",
        "buffer",
        "parameter",
        "copy",
    )
    lines = ["\t".join(head)]
    for row in rows:
        cells = (
            row.name,
            row.role.value,
            row.optimizer,
            _shape(row.shape),
            row.held,
            f"{row.owned.start}:{row.owned.stop}",
            _or_dash(row.owner),
            _or_dash(row.weight_decay),
            _or_dash(row.lr_multiplier),
            row.reduction or "-",
            row.buffer or "-",
            row.parameter,
            "copy" if row.is_copy else "-",
        )
        lines.append("\t".join(map(str, cells)))
    return "\n".join(lines) + "\n"


def console_lines(whole: Holding) -> list[str]:
    """The same in short: a line for roles that are treated alike and have the same shapes, and one for each buffer."""
    roles = [("updated by", "role", "matrices", "shapes", "decay", "lr x"), *_by_role(whole.rows)]
    buffers = [("buffers", "gradients of", "over", "elements", "added up by", "padding"), *_by_buffer(whole.buffers)]
    return [*_aligned(roles), *_aligned(buffers)]


# ---------------------------------------------------------------------------------------- rows


def _rows(plan: BufferPlan, piece: Piece, ranks: Sequence[int], is_copy: bool) -> Iterator[Row]:
    for run in held_matrices(piece.shard):
        start, stop = max(run.start, piece.start), min(run.stop, piece.stop)
        if start < stop:
            yield Row(
                matrix=run.part.matrix.name,
                expert=run.expert,
                role=run.part.matrix.role,
                optimizer=piece.rule.algorithm.value,
                shape=run.shape,
                held=_held(piece.shard, run.part),
                first=run.part.range[0],
                owned=range(start - run.start, stop - run.start),
                owner=ranks[piece.owner],
                weight_decay=piece.rule.weight_decay,
                lr_multiplier=piece.rule.lr_multiplier,
                reduction=plan.layout.reduction.value if plan.layout.ranks > 1 else "",
                buffer=plan.title,
                parameter=piece.shard.parameter.name,
                is_copy=is_copy,
            )


def _without_owner(shard: ParameterShard, run: HeldMatrix, updated_by: str) -> Row:
    return Row(
        matrix=run.part.matrix.name,
        expert=run.expert,
        role=run.part.matrix.role,
        optimizer=updated_by,
        shape=run.shape,
        held=_held(shard, run.part),
        first=run.part.range[0],
        owned=range(run.stop - run.start),
        owner=None,
        weight_decay=None,
        lr_multiplier=None,
        reduction="",
        buffer="",
        parameter=shard.parameter.name,
        is_copy=False,
    )


def _held(shard: ParameterShard, part: MatrixShard) -> str:
    if part.count == 1 or shard.parameter.is_expert:
        return "all"
    return f"{('rows', 'columns')[part.axis]} {part.range[0]}:{part.range[1]}"


def _summary(plan: BufferPlan, first_rank: int, element_size: int) -> BufferSummary:
    layout = plan.layout
    # Parameters lie in the same layout where cells are gathered.
    parameters = element_size if layout.has_cells and layout.ranks > 1 else 0
    return BufferSummary(
        plan.title,
        first_rank,
        layout.ranks,
        layout.reduction,
        layout.length - layout.padding,
        layout.padding,
        layout.scattered_padding,
        _FP32 + parameters,
    )


# ------------------------------------------------------------------------------------- console


def _by_role(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    matrices: dict[tuple[ParameterRole, str, float | None, float | None], dict[str, tuple[int, ...]]] = {}
    frozen: set[str] = set()
    for row in rows:
        if row.optimizer == FROZEN:
            frozen.add(row.name)
        else:
            key = row.role, row.optimizer, row.weight_decay, row.lr_multiplier
            matrices.setdefault(key, {})[row.name] = row.shape
    alike: dict[tuple[str, ...], list[str]] = {}
    for role, optimizer, decay, multiplier in sorted(
        matrices, key=lambda key: (_OPTIMIZERS.index(key[1]), _ROLES.index(key[0]))
    ):
        shapes = matrices[role, optimizer, decay, multiplier]
        distinct = sorted(set(shapes.values()))
        texts = [_shape(shape) for shape in distinct]
        shown = ", ".join(texts if len(texts) <= 3 else [texts[0], "...", texts[-1]])
        key_of_line = optimizer, f"{len(shapes):,}", shown, _or_dash(decay), _or_dash(multiplier)
        alike.setdefault(key_of_line, []).append(role.value)
    for (optimizer, *rest), names in alike.items():
        each = "each " if len(names) > 1 else ""
        yield optimizer, ", ".join(names), f"{each}{rest[0]}", *rest[1:]
    if frozen:
        yield FROZEN, "parameters of any role", f"{len(frozen):,}", "", "-", "-"


def _by_buffer(buffers: Iterable[BufferSummary]) -> Iterator[tuple[str, ...]]:
    alike: dict[tuple[str, int, Reduction], list[BufferSummary]] = {}
    for buffer in buffers:
        alike.setdefault((buffer.title, buffer.ranks, buffer.reduction), []).append(buffer)
    for (title, ranks, reduction), members in alike.items():
        kind, _, group = title.partition(" over ")
        over = f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" ({group})" if group else "")
        sizes = _span([member.elements for member in members])
        yield f"{len(members)}", kind, over, sizes, reduction.value if ranks > 1 else "-", _padding(members)


def _padding(members: Sequence[BufferSummary]) -> str:
    """Of a buffer; of several alike from the least to the most."""
    if members[0].ranks == 1:
        return "-"
    shares = [member.padding / max(member.elements, 1) for member in members]
    sizes = [round(member.padding * member.bytes_per_element / _MIB, 3) for member in members]
    percent = [round(100 * share, 2) for share in shares]
    text = f"{_figures(percent)} %, {_figures(sizes)} MiB" if any(shares) else "none"
    scattered = [member.scattered_padding for member in members]
    if shares == scattered:
        return text
    return f"{text} (reduce_scatter: {_figures([100 * share for share in scattered])} %)"


def _figures(values: Sequence[float]) -> str:
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
