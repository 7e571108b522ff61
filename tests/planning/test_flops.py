"""FLOPs per token against sums over positions, hand counts and published ratios."""

from __future__ import annotations

import dataclasses
import math

import pytest

from steptron.model.layer_spec import model_spec
from steptron.model.stages import Stage, split_stages
from steptron.planning.flops import (
    forward_flops_per_token,
    mean_visible_keys,
    stage_forward_flops,
    training_flops_per_token,
)
from tests.planning.models import flash, small


@pytest.mark.parametrize("sequence_length", [1, 2, 5, 6, 7, 8, 64])
@pytest.mark.parametrize("window", [None, 1, 6, 7])
def test_mean_visible_keys_is_the_mean_over_positions(window: int | None, sequence_length: int) -> None:
    visible = sum(
        1 for query in range(sequence_length) for key in range(query + 1) if window is None or query - key < window
    )
    assert mean_visible_keys(window, sequence_length) * sequence_length == visible


def visible_keys(window: int | None, sequence_length: int) -> float:
    return sum(min(position + 1, window or math.inf) for position in range(sequence_length)) / sequence_length


@pytest.mark.parametrize("sequence_length", [4, 6, 33])
def test_a_small_model_by_hand(sequence_length: int) -> None:
    """6 FLOPs per matrix parameter on the token, 12 per head dimension and visible key."""
    flops = training_flops_per_token(model_spec(small()), sequence_length, mtp_depths_trained=1)
    full = 64 * (2 * 4 * 16 + 2 * 2 * 16 + 4)
    sliding = 64 * (2 * 6 * 16 + 2 * 3 * 16 + 6)
    # Two full layers, two sliding ones, and the MTP depth's sliding layer with its dense feed-forward.
    assert flops.attention_projections == 6 * (2 * full + 3 * sliding)
    assert flops.attention_scores == pytest.approx(
        12 * 16 * (2 * 4 * visible_keys(None, sequence_length) + 3 * 6 * visible_keys(6, sequence_length)), rel=1e-12
    )
    assert flops.dense_ffn == 6 * 3 * (3 * 64 * 96)
    assert flops.routed_experts == 6 * 2 * 3 * (3 * 64 * 32)
    assert flops.shared_experts == 6 * 2 * (3 * 64 * 48)
    assert flops.router == 6 * 2 * (8 * 64)
    assert flops.mtp_projections == 6 * 64 * 128
    assert flops.heads == 6 * 2 * 1000 * 64
    assert flops.total == pytest.approx(sum(dataclasses.asdict(flops).values()), rel=1e-15)


def test_depths_that_are_not_trained_cost_nothing() -> None:
    spec = model_spec(small())
    none, one, two = (training_flops_per_token(spec, 32, depths).total for depths in (0, 1, 2))
    assert one - none == pytest.approx(two - one, rel=1e-12)
    assert none == training_flops_per_token(model_spec(small(mtp=dict(depths=0))), 32, 0).total


def test_a_shared_head_is_used_as_often_as_an_own_one() -> None:
    shared = model_spec(small(mtp=dict(depths=2, head="shared")))
    assert training_flops_per_token(shared, 32, 2) == training_flops_per_token(model_spec(small()), 32, 2)


def test_what_acts_on_no_token_does_not_count() -> None:
    """Vocabulary rows of the embedding, more experts at the same top-k (router aside), and sinks."""
    base = training_flops_per_token(model_spec(small()), 32, 1)
    experts = dict(num_experts=16, top_k=3, expert_hidden_size=32, shared_hidden_size=48)
    more = training_flops_per_token(model_spec(small(moe=experts)), 32, 1)
    assert dataclasses.replace(more, router=base.router) == base
    assert more.router == 2 * base.router
    assert training_flops_per_token(model_spec(small("S1F1+heads+gate+sink")), 32, 1) == base
    vocabulary = training_flops_per_token(model_spec(small(vocab_size=2000)), 32, 1)
    assert vocabulary.total - base.total == base.heads


def test_training_is_three_forward_passes() -> None:
    spec = model_spec(small())
    assert training_flops_per_token(spec, 32, 2).total == pytest.approx(
        3 * forward_flops_per_token(spec, 32, 2).total, rel=1e-15
    )


def test_the_released_model_at_4k() -> None:
    """6 × active matrices (norms, selection biases and embedding taken off the published active count)."""
    flops = training_flops_per_token(model_spec(flash()), 4096, 0)
    vectors = 45 * (2 * 4096 + 2 * 128) + 4096 + 42 * 288
    matrices = 11_459_365_952 - vectors
    scores = 12 * 128 * (12 * 64 * visible_keys(None, 4096) + 33 * 96 * visible_keys(512, 4096))
    assert flops.total == pytest.approx(6 * matrices + scores, rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "at_64k", "at_256k"),
    [("FFFF+gate", 2.05, 2.97), ("S1F1+gate", 1.35, 1.66)],
)
def test_prefill_ratios_of_flash(layout: str, at_64k: float, at_256k: float) -> None:
    """Total prefill FLOPs over those of S3F1, for Flash's shape with equal heads and without the
    output matrix, which a prefill needs for one position only (the report's table 8 gives
    2.07/3.00 and 1.38/1.71)."""

    def prefill(layout: str, sequence_length: int) -> float:
        flops = forward_flops_per_token(model_spec(flash(layout)), sequence_length)
        return flops.total - flops.heads

    ratios = [prefill(layout, length) / prefill("S3F1+gate", length) for length in (65536, 262144)]
    assert [round(ratio, 2) for ratio in ratios] == [at_64k, at_256k]


@pytest.mark.parametrize(("length", "depths", "message"), [(0, 0, "sequence_length"), (8, 3, "model.mtp.depths")])
def test_impossible_questions_are_refused(length: int, depths: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training_flops_per_token(model_spec(small()), length, depths)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("mtp_depths", [0, 2])
def test_stages_share_the_model_s_flops(stages: int, mtp_depths: int) -> None:
    spec = model_spec(small())
    parts = [stage_forward_flops(spec, stage, 32, mtp_depths) for stage in split_stages(4, stages)]
    assert sum(parts) == pytest.approx(forward_flops_per_token(spec, 32, mtp_depths).total)


def test_an_empty_stage_has_no_flops() -> None:
    assert stage_forward_flops(model_spec(small()), Stage((), is_first=False, is_last=False), 32) == 0
