"""Norms of many matrices by few operations."""

from __future__ import annotations

import torch
from torch import Tensor

from steptron.telemetry.matrices import norms_of, rows_of


def check(vectors: list[Tensor], operations: int) -> None:
    rows = rows_of(vectors)
    assert len(rows) == operations
    assert [row.tolist() for block in rows for row in block] == [vector.tolist() for vector in vectors]
    expected = torch.stack([vector.double().norm() for vector in vectors])
    torch.testing.assert_close(norms_of(rows).double(), expected, rtol=1e-6, atol=0)


def test_vectors_at_equal_distances_are_rows_of_one() -> None:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    side_by_side = [flat[start : start + 50] for start in range(0, 500, 50)]
    gates = [flat[start : start + 50] for start in range(0, 500, 100)]
    check(side_by_side, 1)
    check(gates, 1)
    check(gates + side_by_side[1::2], 2)
    check([*side_by_side[:4], *side_by_side[6:]], 2)  # a gap
    check([flat[:50], flat[50:80], flat[80:110], flat[110:160]], 3)  # other sizes
    check([flat[100:150], flat[:50]], 2)  # backwards
    check([flat[:50], flat[25:75]], 2)  # overlapping
    check([flat[:50], flat[50:100].clone()], 2)  # other storage
    check([flat[:50].bfloat16(), flat[50:100]], 2)  # other dtype
    check([flat[7:8]], 1)


def test_views_show_what_is_written_later() -> None:
    flat = torch.zeros(6)
    rows = rows_of([flat[:3], flat[3:]])
    flat += 2
    torch.testing.assert_close(norms_of(rows), torch.full((2,), 12.0).sqrt())


def test_what_is_not_finite_is_infinite() -> None:
    flat = torch.tensor([1.0, torch.nan, 1.0, torch.inf, 3.0, 4.0])
    assert norms_of(rows_of(list(flat.split(2)))).tolist() == [torch.inf, torch.inf, 5.0]
    assert norms_of([]).shape == (0,)
