"""Parameter counts against the released model's figures and hand counts."""

from __future__ import annotations

import pytest

from steptron.model.layer_spec import model_spec
from steptron.planning.parameters import count_parameters
from tests.planning.models import flash, small


def test_the_released_model() -> None:
    counts = count_parameters(model_spec(flash()))
    assert counts.main == 196_956_130_368
    assert counts.mtp == (809_390_336,) * 3
    assert counts.total == 199_384_301_376
    assert round(counts.active / 1e9, 3) == 10.931
    assert round(counts.active_with_head / 1e9, 3) == 11.459
    assert round(counts.active_with_embedding_and_head / 1e9, 3) == 11.987
    # Attention, norms, and feed-forward of each kind of layer.
    full, sliding, norms = 75_759_872, 109_445_376, 2 * 4096
    moe = 4_529_848_320 + 15_728_640 + 1_179_648 + 288
    assert counts.layers[0] == full + norms + 138_412_032
    assert counts.layers[1] == sliding + norms + 138_412_032
    assert counts.layers[3] == sliding + norms + moe
    assert counts.layers[44] == full + norms + moe
    assert counts.active_layers[44] == full + norms + 4_529_848_320 // 36 + 15_728_640 + 1_179_648 + 288
    assert counts.active_layers[0] == counts.layers[0]
    assert sum(counts.layers) + counts.embedding + counts.head + 4096 == counts.main


def test_a_small_model_by_hand() -> None:
    counts = count_parameters(model_spec(small()))
    full = 64 * (2 * 4 * 16 + 2 * 2 * 16 + 4) + 2 * 16
    sliding = 64 * (2 * 6 * 16 + 2 * 3 * 16 + 6) + 2 * 16
    dense, expert, shared, router = 3 * 64 * 96, 3 * 64 * 32, 3 * 64 * 48, 8 * 64 + 8
    norms = 2 * 64
    assert counts.layers == (
        full + norms + dense,
        sliding + norms + dense,
        full + norms + 8 * expert + shared + router,
        sliding + norms + 8 * expert + shared + router,
    )
    assert counts.active_layers[2:] == tuple(size - 5 * expert for size in counts.layers[2:])
    depth = sliding + norms + dense + 2 * 64 + 64 * 128 + 64 + 1000 * 64
    assert counts.mtp == (depth, depth)
    assert counts.active == sum(counts.active_layers) + 64
    assert (counts.embedding, counts.head) == (64_000, 64_000)


@pytest.mark.parametrize(
    ("layout", "mtp_head", "change"),
    [
        # No gate: one row of the hidden size per head less.
        ("S1F1+heads", "own", {"main": -64 * (2 * 4 + 2 * 6), "mtp": -64 * 6}),
        # A sink adds one value per head.
        ("S1F1+heads+gate+sink", "own", {"main": 2 * 4 + 2 * 6, "mtp": 6}),
        # A shared head leaves each depth without its own.
        ("S1F1+heads+gate", "shared", {"main": 0, "mtp": -64_000}),
    ],
)
def test_options_change_the_counts(layout: str, mtp_head: str, change: dict[str, int]) -> None:
    before = count_parameters(model_spec(small()))
    after = count_parameters(model_spec(small(layout, mtp=dict(depths=2, head=mtp_head))))
    assert after.main - before.main == change["main"]
    assert [new - old for new, old in zip(after.mtp, before.mtp, strict=True)] == [change["mtp"]] * 2
