"""What differs between two sets of weights: configuration fields, tensors, and how far their values lie apart.

Tensors are read one by one and in pieces; neither model is ever whole in memory. Two tensors are the same when every
bit is: the same shape, dtype and values, zeros of the same sign, NaNs with the same bits. Values of different dtypes
are compared after an exact conversion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from steptron.checkpoint.compare_sources import Header, Source
from steptron.checkpoint.released.model_config import read_model_config, write_model_config
from steptron.checkpoint.released.transformers_names import HEAD, layer_of, mtp_layers
from steptron.config.schema import ModelConfig
from steptron.errors import ConfigError

PIECE_ELEMENTS = 1 << 24
ABSENT = "absent"

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class FieldDifference:
    """A field of the model configuration, by dotted key, and both values; ``ABSENT`` where there is no such key."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class ValueDifference:
    """How the values of two tensors of one shape differ.

    Attributes:
        elements: numbers in each tensor.
        differing: elements that are not equal, NaNs with other bits and NaNs against numbers among them.
        zero_signs: elements that are zero in both and have another sign: equal as numbers, not bit by bit.
        nans_a, nans_b: NaNs in each.
        nan_mismatches: of ``differing``, those with a NaN on either side.
        max_abs: largest absolute difference of two numbers.
        relative: 2-norm of the difference over the 2-norm of A, NaNs left out; infinite where A is zero.
    """

    elements: int
    differing: int
    zero_signs: int
    nans_a: int
    nans_b: int
    nan_mismatches: int
    max_abs: float
    relative: float

    @property
    def is_bit_equal(self) -> bool:
        return self.differing == self.zero_signs == 0


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same in both; ``values`` is None where the shapes differ."""

    name: str
    a: Header
    b: Header
    values: ValueDifference | None

    def is_within(self, tolerance: float) -> bool:
        """Whether the relative difference is at most ``tolerance``; 0 asks for the same bits in the same dtype."""
        if self.values is None or self.values.nan_mismatches:
            return False
        if tolerance == 0:
            return self.values.is_bit_equal and self.a.dtype == self.b.dtype
        return self.values.relative <= tolerance

    @property
    def badness(self) -> tuple[float, ...]:
        """Larger is worse: another shape, NaNs, then by relative difference."""
        if self.values is None:
            return (math.inf,) * 5
        values = self.values
        return (0, values.nan_mismatches, values.relative, values.differing, values.zero_signs)


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        fields: differing fields of the model configuration; None where a side says nothing of it.
        only_a, only_b: tensors that just one side has, by released name.
        not_compared: tensors that the other side's layout cannot hold: output matrix and MTP depths against
            transformers' model.
        compared: tensors that both have.
        differences: those of them that are not bit by bit the same, worst first.
    """

    fields: list[FieldDifference] | None
    only_a: list[str]
    only_b: list[str]
    not_compared: list[str]
    compared: int
    differences: list[TensorDifference]

    def beyond(self, tolerance: float) -> list[TensorDifference]:
        """The differences that a tolerance does not cover, worst first."""
        return [difference for difference in self.differences if not difference.is_within(tolerance)]

    def is_same(self, tolerance: float = 0.0) -> bool:
        """Whether both are the same model with the same weights, up to a relative difference of every tensor."""
        return not (self.fields or self.only_a or self.only_b or self.beyond(tolerance))


def compare_weights(a: Source, b: Source, report: Callable[[int, int], None] = lambda done, total: None) -> Comparison:
    """Compares two sets of weights.

    Args:
        a, b: both sides; relative differences are relative to A.
        report: called with the number of elements compared so far, and of all.

    Raises:
        UserError: a file cannot be read.
    """
    outside = set(_outside(a, b)) | set(_outside(b, a))
    common = [name for name in a.tensors if name in b.tensors]
    same_shape = [name for name in common if a.tensors[name].shape == b.tensors[name].shape]
    total, done = sum(math.prod(a.tensors[name].shape) for name in same_shape), 0
    differences = []
    for name in common:
        headers, values = (a.tensors[name], b.tensors[name]), None
        if headers[0].shape == headers[1].shape:
            sums = _Sums()
            row = math.prod(headers[0].shape[1:])
            length = max(1, PIECE_ELEMENTS // max(1, row))
            for piece_a, piece_b in zip(a.pieces(name, length), b.pieces(name, length), strict=True):
                sums.add(piece_a, piece_b)
                done += piece_a.numel()
                report(done, total)
            values = sums.difference()
        if values is None or not values.is_bit_equal or headers[0].dtype != headers[1].dtype:
            differences.append(TensorDifference(name, *headers, values))
    return Comparison(
        fields=_fields(a, b),
        only_a=[name for name in a.tensors if name not in b.tensors and name not in outside],
        only_b=[name for name in b.tensors if name not in a.tensors and name not in outside],
        not_compared=sorted(outside),
        compared=len(common),
        differences=sorted(differences, key=lambda difference: difference.badness, reverse=True),
    )


def _outside(whole: Source, trunk: Source) -> list[str]:
    """Of one side's tensors, those that transformers' model on the other side has no place for."""
    if trunk.kind != "transformers layout" or whole.kind == "transformers layout":
        return []
    depths = mtp_layers(whole.tensors)
    return [name for name in whole.tensors if name not in trunk.tensors and (name == HEAD or layer_of(name) in depths)]


def _fields(a: Source, b: Source) -> list[FieldDifference] | None:
    if a.model is None or b.model is None:
        return None
    one, other = a.model, b.model
    if (a.kind == "checkpoint") != (b.kind == "checkpoint"):
        # What a config.json cannot say (initialisation, spellings of the layout) is no difference between the two.
        one, other = _as_released(one), _as_released(other)
    leaves_a, leaves_b = (dict(_leaves(model.model_dump(mode="json"))) for model in (one, other))
    return [
        FieldDifference(key, leaves_a.get(key, ABSENT), leaves_b.get(key, ABSENT))
        for key in dict.fromkeys([*leaves_a, *leaves_b])
        if leaves_a.get(key, ABSENT) != leaves_b.get(key, ABSENT)
    ]


def _as_released(model: ModelConfig) -> ModelConfig:
    """A model as it comes back from a released config.json; where none can say it, all but its initial values."""
    source = "the model"
    try:
        return read_model_config(write_model_config(model, "bf16", max_position_embeddings=1), source)
    except ConfigError:
        return model.model_copy(
            update={"init": ModelConfig.model_fields["init"].get_default(call_default_factory=True)}
        )


def _leaves(tree: Mapping[str, Any], prefix: str = "model.") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves += _leaves(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


class _Sums:
    """Adds up the differences of a tensor's pieces."""

    def __init__(self) -> None:
        self.elements = self.differing = self.zero_signs = 0
        self.nans_a = self.nans_b = self.nan_mismatches = 0
        self.max_abs = self.squares_a = self.squares_difference = 0.0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.elements += a.numel()
        if a.dtype != b.dtype:
            # Exact: every dtype of weights has fewer bits in all its parts.
            a, b = a.double(), b.double()
        if torch.equal(_bits(a), _bits(b)):
            self._add_equal(a)
        else:
            self._add_different(a, b)

    def _add_equal(self, a: torch.Tensor) -> None:
        squares = torch.linalg.vector_norm(a, dtype=torch.float64).item() ** 2 if a.is_floating_point() else 0.0
        if math.isnan(squares):
            nans = a.isnan()
            count = int(nans.sum())
            self.nans_a, self.nans_b = self.nans_a + count, self.nans_b + count
            squares = a.double().masked_fill_(nans, 0.0).square_().sum().item()
        self.squares_a += squares

    def _add_different(self, a: torch.Tensor, b: torch.Tensor) -> None:
        other_bits = _bits(a) != _bits(b)
        a, b = a.double(), b.double()
        nans_a, nans_b = a.isnan(), b.isnan()
        nans, equal = nans_a | nans_b, a == b
        different = other_bits & ~equal
        self.differing += int(different.sum())
        self.zero_signs += int((other_bits & equal).sum())
        self.nans_a += int(nans_a.sum())
        self.nans_b += int(nans_b.sum())
        self.nan_mismatches += int((different & nans).sum())
        # Equal infinities have no difference that can be computed.
        distance = (a - b).abs_().masked_fill_(nans | equal, 0.0)
        self.max_abs = max(self.max_abs, distance.max().item())
        self.squares_difference += distance.square_().sum().item()
        self.squares_a += a.masked_fill(nans_a, 0.0).square_().sum().item()

    def difference(self) -> ValueDifference:
        relative = 0.0
        if self.squares_difference:
            ratio = self.squares_difference / self.squares_a if self.squares_a else math.inf
            relative = math.inf if math.isnan(ratio) else math.sqrt(ratio)
        return ValueDifference(
            self.elements,
            self.differing,
            self.zero_signs,
            self.nans_a,
            self.nans_b,
            self.nan_mismatches,
            self.max_abs,
            relative,
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])
