"""Loss spikes and the policy about batches that are not learned from."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from steptron.config.schema import FaultsConfig, LossSpikeConfig
from steptron.errors import UserError
from steptron.train.faults import FaultPolicy, LossSpikes
from steptron.train.losses import TokenCounts
from steptron.train.step import Losses, NonFiniteError, Observation, RejectedStep


def spikes(threshold: float | None, window: int, recent: tuple[float, ...] = ()) -> LossSpikes:
    return LossSpikes(LossSpikeConfig(threshold=threshold, window=window), recent)


# ------------------------------------------------------------------------------------- loss spikes


def test_a_spike_is_told_from_the_median_and_not_the_mean() -> None:
    # Mean 4, median 2: a loss of 4.75 is near the one and far above the other.
    judged = spikes(2.5, 5, (2.0, 1.0, 12.0, 2.0, 3.0))
    assert judged.judge(4.5) is None  # exactly the threshold above
    assert judged.judge(4.75) == (
        "loss 4.7500 is 2.7500 nats above 2.0000, the median of the last 5 steps "
        "(train.faults.loss_spike.threshold: 2.5)"
    )
    assert judged.judge(-20.0) is None  # far below is no spike


def test_the_median_of_an_even_window_lies_between_two() -> None:
    judged = spikes(1.0, 4, (1.0, 2.0, 3.0, 9.0))
    assert judged.judge(3.5) is None
    assert judged.judge(3.625) is not None


def test_nothing_is_judged_before_the_window_is_full() -> None:
    judged = spikes(0.5, 3)
    for loss in (1.0, 1.0):
        assert judged.judge(100.0) is None
        judged.accept(loss)
    assert judged.judge(100.0) is None
    judged.accept(1.0)
    assert judged.judge(100.0) is not None
    assert judged.recent == (1.0, 1.0, 1.0)


def test_the_window_moves_on_with_accepted_losses_only() -> None:
    judged = spikes(1.0, 3, (1.0, 2.0, 3.0))
    assert judged.judge(9.0) is not None
    assert judged.recent == (1.0, 2.0, 3.0)  # a judged loss is not taken
    judged.accept(4.0)
    assert judged.recent == (2.0, 3.0, 4.0)
    assert judged.judge(4.0) is None  # median 3 now


def test_a_longer_past_than_the_window_is_cut_to_its_end() -> None:
    assert spikes(1.0, 2, (9.0, 9.0, 1.0, 2.0)).recent == (1.0, 2.0)


def test_without_a_threshold_nothing_is_judged_or_remembered() -> None:
    judged = spikes(None, 2, (1.0, 1.0))
    assert judged.judge(1e9) is None
    judged.accept(1.0)
    assert judged.recent == ()


def test_a_batch_without_a_target_is_no_spike_and_says_nothing_of_others() -> None:
    """Its loss is NaN. One that is not finite for another reason has a policy of its own."""
    judged = spikes(1.0, 2, (1.0, 2.0))
    assert judged.judge(math.nan) is None
    judged.accept(math.nan)
    assert judged.recent == (1.0, 2.0)


# ------------------------------------------------------------------------------------------ policy

OBSERVED = Observation(
    Losses(1.0, (), None, 1.0),
    TokenCounts(1, (1,), (1,)),
    torch.zeros(0, 0, dtype=torch.int64),
    None,
    stop_requested=False,
    all_written=False,
)
SPIKE, NAN = RejectedStep("a spike", OBSERVED), NonFiniteError("a NaN", OBSERVED)


def policy(**settings: Any) -> FaultPolicy:
    return FaultPolicy(FaultsConfig.model_validate(settings))


def test_each_kind_of_fault_has_its_policy() -> None:
    decider = policy(on_non_finite="skip", loss_spike={"policy": "roll_back"})
    assert decider.decide(NAN, 3) == "skip"
    assert decider.decide(SPIKE, 4) == "roll_back"
    decider = policy(on_non_finite="roll_back", loss_spike={"policy": "skip"})
    assert decider.decide(NAN, 3) == "roll_back"
    assert decider.decide(SPIKE, 4) == "skip"


def test_by_default_nan_stops_and_says_what_was_seen() -> None:
    with pytest.raises(UserError, match=re.escape("training stopped at step 5: a NaN")):
        policy().decide(NAN, 5)
    with pytest.raises(UserError, match=re.escape("training stopped at step 5: a spike")):
        policy(loss_spike={"policy": "stop"}).decide(SPIKE, 5)


def test_the_fault_after_max_in_a_row_stops() -> None:
    decider = policy(on_non_finite="skip", max_in_a_row=2)
    assert [decider.decide(NAN, step) for step in (5, 6)] == ["skip", "skip"]
    with pytest.raises(UserError, match=r"stopped at step 7, after 2 such faults .*train\.faults\.max_in_a_row.*a NaN"):
        decider.decide(NAN, 7)


def test_a_good_step_beyond_the_faults_starts_the_count_anew() -> None:
    decider = policy(on_non_finite="skip", max_in_a_row=2)
    for step in range(5, 50, 3):
        assert [decider.decide(NAN, step), decider.decide(NAN, step + 1)] == ["skip", "skip"]
        decider.accepted(step + 2)


def test_kinds_of_faults_are_counted_together() -> None:
    decider = policy(on_non_finite="skip", loss_spike={"policy": "skip"}, max_in_a_row=2)
    decider.decide(NAN, 1)
    decider.decide(SPIKE, 2)
    with pytest.raises(UserError, match="stopped at step 3"):
        decider.decide(NAN, 3)


def test_steps_made_again_after_a_roll_back_are_no_progress() -> None:
    """A run that always fails at the same step would otherwise go round for ever."""
    decider = policy(on_non_finite="roll_back", max_in_a_row=2)
    for _ in range(2):
        for step in (5, 6, 7):  # from the checkpoint of step 4
            decider.accepted(step)
        assert decider.decide(NAN, 8) == "roll_back"
    for step in (5, 6, 7):
        decider.accepted(step)
    with pytest.raises(UserError, match="stopped at step 8"):
        decider.decide(NAN, 8)


def test_after_a_roll_back_the_step_that_failed_is_beyond_the_faults_only_when_it_is_past() -> None:
    decider = policy(on_non_finite="roll_back", max_in_a_row=1)
    assert decider.decide(NAN, 8) == "roll_back"
    decider.accepted(8)
    with pytest.raises(UserError):
        decider.decide(NAN, 6)
    decider = policy(on_non_finite="roll_back", max_in_a_row=1)
    assert decider.decide(NAN, 8) == "roll_back"
    decider.accepted(9)
    assert decider.decide(NAN, 10) == "roll_back"
