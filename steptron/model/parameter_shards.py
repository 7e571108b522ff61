"""Which part of each parameter a rank holds: rows or columns over tensor parallelism, experts over expert parallelism.

Every logical matrix is cut on its own, so that the fused input projection of a rank is [query; key; value;
gate] of its heads, and gate_up is [gate; up] of its columns. Where the vocabulary does not divide, every rank's
embedding and output matrices have as many rows as the largest part needs; the rows that are left over at the end
stand for no token and take no part in any result (in training they are zeros and stay so). Plain data, no torch: the
model's initialisation, checkpoints, the planner and the optimizer's table read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from steptron.model.layer_spec import EXPERT_ROLES, LogicalMatrix, ParameterRole, ParameterSpec


class Cut(StrEnum):
    """How the ranks of a stage share a parameter."""

    ROWS = "rows"
    """Tensor-parallel ranks hold equal runs of rows (output features, heads, vocabulary)."""
    COLUMNS = "columns"
    """Tensor-parallel ranks hold equal runs of columns (input features)."""
    EXPERTS = "experts"
    """Expert-parallel ranks hold equal runs of experts; each is whole."""
    NONE = "none"
    """Every rank of the stage holds all of it."""


_ROWS = frozenset(
    {
        ParameterRole.EMBEDDING,
        ParameterRole.HEAD,
        ParameterRole.QUERY,
        ParameterRole.KEY,
        ParameterRole.VALUE,
        ParameterRole.HEAD_GATE,
        ParameterRole.SINK,
        ParameterRole.FFN_GATE,
        ParameterRole.FFN_UP,
        ParameterRole.SHARED_GATE,
        ParameterRole.SHARED_UP,
    }
)
_VOCABULARY = frozenset({ParameterRole.EMBEDDING, ParameterRole.HEAD})
_COLUMNS = frozenset({ParameterRole.ATTENTION_OUTPUT, ParameterRole.FFN_DOWN, ParameterRole.SHARED_DOWN})


def cut_of(role: ParameterRole) -> Cut:
    """How a parameter of this role is shared."""
    if role in EXPERT_ROLES:
        return Cut.EXPERTS
    if role in _ROWS:
        return Cut.ROWS
    return Cut.COLUMNS if role in _COLUMNS else Cut.NONE


def replicas_of(role: ParameterRole, tensor_size: int) -> str:
    """The group whose ranks hold the same part of a parameter, by its name in ``ProcessGroupCollection``."""
    cut = cut_of(role)
    if cut is Cut.EXPERTS:
        return "expt_dp"
    return "tp_dp_cp" if cut is Cut.NONE and tensor_size > 1 else "dp_cp"


@dataclass(frozen=True)
class Place:
    """A rank's coordinates among the ranks that share the parameters of its pipeline stage."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1


@dataclass(frozen=True)
class MatrixShard:
    """The part of a logical matrix that a rank holds.

    Attributes:
        matrix: the whole matrix.
        rows: slice of the local tensor's row axis (axis 0; axis 1 of stacked experts); without padding.
        axis, index, count: the part is number ``index`` of ``count`` along ``axis`` of the matrix (of stacked
            experts: of the stack). They are equal, but for the last ones of a vocabulary that does not divide.
        range: the part's run along that axis.
        extent: length of the whole matrix along it.
    """

    matrix: LogicalMatrix
    rows: tuple[int, int]
    axis: int
    index: int
    count: int
    range: tuple[int, int]
    extent: int

    @property
    def is_even(self) -> bool:
        """Whether all parts are equal; the same on every rank."""
        return self.extent % self.count == 0


@dataclass(frozen=True)
class ParameterShard:
    """The part of a stored parameter that a rank holds: its local shape and matrices."""

    parameter: ParameterSpec
    shape: tuple[int, ...]
    matrices: tuple[MatrixShard, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def shard(parameter: ParameterSpec, place: Place) -> ParameterShard:
    """The part of a parameter that the rank at ``place`` holds.

    Raises:
        ValueError: a matrix cannot be cut into equal parts; the message names it.
    """
    cut = cut_of(parameter.role)
    shape = list(parameter.shape)
    if cut is Cut.EXPERTS:
        shape[0] = _part(parameter.name, "experts", shape[0], place.expert_size)
        return ParameterShard(parameter, tuple(shape), _whole_rows(parameter, 0, place.expert_rank, place.expert_size))
    if cut is Cut.COLUMNS:
        shape[1] = _part(parameter.name, "columns", shape[1], place.tensor_size)
        return ParameterShard(parameter, tuple(shape), _whole_rows(parameter, 1, place.tensor_rank, place.tensor_size))
    if cut is Cut.NONE:
        return ParameterShard(parameter, tuple(shape), tuple(map(_uncut, parameter.matrices)))
    if parameter.role in _VOCABULARY:
        return _vocabulary_shard(parameter, place)
    matrices, row = [], 0
    for matrix in parameter.matrices:
        extent = matrix.rows[1] - matrix.rows[0]
        rows = _part(matrix.name, "rows", extent, place.tensor_size)
        matrices.append(_even(matrix, (row, row + rows), 0, place.tensor_rank, place.tensor_size, extent))
        row += rows
    return ParameterShard(parameter, (row, *shape[1:]), tuple(matrices))


def vocabulary_rows(vocab_size: int, tensor_size: int) -> int:
    """Rows of the embedding and of the output matrices on every tensor-parallel rank, padding included."""
    return -(-vocab_size // tensor_size)


def _vocabulary_shard(parameter: ParameterSpec, place: Place) -> ParameterShard:
    vocab_size, *columns = parameter.shape
    rows = vocabulary_rows(vocab_size, place.tensor_size)
    start = min(place.tensor_rank * rows, vocab_size)
    stop = min(start + rows, vocab_size)
    part = MatrixShard(
        parameter.matrices[0],
        (0, stop - start),
        0,
        place.tensor_rank,
        place.tensor_size,
        (start, stop),
        vocab_size,
    )
    return ParameterShard(parameter, (rows, *columns), (part,))


def _whole_rows(parameter: ParameterSpec, axis: int, index: int, count: int) -> tuple[MatrixShard, ...]:
    """Matrices that keep all their rows and are cut along another axis (of stacked experts: the stack)."""
    extent = parameter.shape[axis]
    return tuple(_even(matrix, matrix.rows, axis, index, count, extent) for matrix in parameter.matrices)


def _uncut(matrix: LogicalMatrix) -> MatrixShard:
    extent = matrix.rows[1] - matrix.rows[0]
    return _even(matrix, matrix.rows, 0, 0, 1, extent)


def _even(matrix: LogicalMatrix, rows: tuple[int, int], axis: int, index: int, count: int, extent: int) -> MatrixShard:
    length = extent // count
    return MatrixShard(matrix, rows, axis, index, count, (index * length, (index + 1) * length), extent)


def _part(name: str, what: str, extent: int, count: int) -> int:
    if extent % count:
        raise ValueError(f"{name}: {extent} {what} cannot be shared by {count} ranks")
    return extent // count


@dataclass(frozen=True)
class MatrixPlace:
    """Where one whole or tensor-parallel part of a logical matrix lies in a rank's tensor.

    Attributes:
        part: the part; of stacked experts, of the stack.
        expert: which expert of the whole layer; None for other matrices.
        start, stop: its run of the flattened local tensor.
        shape: [rows, columns] of the run.
        whole_shape: [rows, columns] of the whole matrix.
    """

    part: MatrixShard
    expert: int | None
    start: int
    stop: int
    shape: tuple[int, int]
    whole_shape: tuple[int, int]

    @property
    def name(self) -> str:
        """The logical matrix; of experts with the expert's number."""
        return self.part.matrix.name if self.expert is None else f"{self.part.matrix.name}[{self.expert}]"

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole_shape


def matrices_of(shard: ParameterShard) -> list[MatrixPlace]:
    """The logical matrices of a rank's part of a parameter, each expert's apart, in the order of memory.

    Raises:
        ValueError: they do not fill the parameter, or it holds vectors; the message names it.
    """
    name, shape = shard.parameter.name, shard.shape
    stack = shape[0] if shard.parameter.is_expert else 1
    if len(shape) != (3 if shard.parameter.is_expert else 2):
        raise ValueError(f"{name} {list(shape)} is no matrix")
    rows, columns = shape[-2:]
    places, covered = [], 0
    for index in range(stack):
        for part in shard.matrices:
            first, last = part.rows
            start, stop = (index * rows + first) * columns, (index * rows + last) * columns
            if start != covered:
                raise ValueError(
                    f"{part.matrix.name}: its rows {part.rows} in {name} {list(shape)} leave a gap or overlap"
                )
            expert = part.range[0] + index if shard.parameter.is_expert else None
            whole = shard.parameter.matrix_shape(part.matrix)[-2:]
            places.append(MatrixPlace(part, expert, start, stop, (last - first, columns), (whole[0], whole[1])))
            covered = stop
    if covered != shard.size:
        raise ValueError(f"{name}: its matrices fill {covered} of {shard.size} elements")
    return places


@dataclass(frozen=True)
class HeldMatrix:
    """A logical matrix or vector, or one expert's, in the flattened tensor of a rank's part.

    Attributes:
        part: the part that the rank holds.
        expert: number of the expert in the whole layer; None for other matrices.
        shape: of the whole matrix.
        start, stop: of the flattened local tensor.
    """

    part: MatrixShard
    expert: int | None
    shape: tuple[int, ...]
    start: int
    stop: int


def held_matrices(shard: ParameterShard) -> Iterator[HeldMatrix]:
    """Every logical matrix or vector of a rank's part, each expert's apart, in the order of memory; rows that fill a
    vocabulary up are in none."""
    parameter = shard.parameter
    stack, inner = (shard.shape[0], shard.shape[1:]) if parameter.is_expert else (1, shard.shape)
    columns = math.prod(inner[1:])
    for index in range(stack):
        for part in shard.matrices:
            start, stop = ((index * inner[0] + row) * columns for row in part.rows)
            shape = parameter.matrix_shape(part.matrix)
            if parameter.is_expert:
                yield HeldMatrix(part, part.range[0] + index, shape[1:], start, stop)
            else:
                yield HeldMatrix(part, None, shape, start, stop)
