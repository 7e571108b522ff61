"""How many tokens are drafted, by what it is seen to bring."""

from __future__ import annotations

import itertools

from steptron.engine.draft_policy import FixedDrafts, MeasuredDrafts
from steptron.engine.engine import Engine, EngineOptions
from tests.engine.helpers import deviation, predictable_model, random_requests


def simulate(policy: MeasuredDrafts, sequences: int, rates: list[float], steps: int) -> list[int]:
    """Steps of 10 tokens, which take as long as the rate with their number of drafts says."""
    taken = []
    for _ in range(steps):
        drafts = policy.choose(sequences)
        policy.observe(sequences, drafts, 10, 10 / rates[drafts])
        taken.append(drafts)
    return taken


def test_what_pays_is_taken_and_others_are_tried_again() -> None:
    policy = MeasuredDrafts(3)
    taken = simulate(policy, 1, [100.0, 150.0, 120.0, 90.0], 1_000)
    assert set(taken[:64]) == {0, 1, 2, 3}
    assert taken[64:].count(1) > 0.85 * len(taken[64:])
    assert set(taken[64:]) == {0, 1, 2, 3}, "an arm was never tried again"


def test_a_change_is_noticed() -> None:
    policy = MeasuredDrafts(1)
    assert simulate(policy, 1, [100.0, 150.0], 400)[-1] == 1
    assert simulate(policy, 1, [100.0, 50.0], 400)[-100:].count(0) >= 80  # a run of 16 tries the other


def test_numbers_of_sequences_are_told_apart() -> None:
    policy = MeasuredDrafts(2)
    for _ in range(20):
        few, many = simulate(policy, 1, [1.0, 2.0, 3.0], 40), simulate(policy, 64, [3.0, 2.0, 1.0], 40)
    assert few.count(2) > 20 and many.count(0) > 20


def test_steps_between_two_numbers_say_nothing() -> None:
    policy = MeasuredDrafts(1)
    for _ in range(100):
        policy.observe(1, 1, 1_000, 1e-9)
        policy.observe(1, 0, 1, 0.0)
    assert policy.choose(1) == 0 and FixedDrafts(2).choose(5) == 2


def test_answers_stay_right_while_the_number_changes() -> None:
    clock = itertools.count(0.0, 0.5)
    options = EngineOptions(128, 512, 8, 64, 4, drafts=2, measure_drafts=True)
    engine = Engine(predictable_model(), options, clock=lambda: next(clock))
    requests = random_requests(60, seed=9, longest_prompt=20)
    for request, (answer, _) in zip(requests, engine.generate(requests), strict=True):
        assert len(answer) == request.max_tokens
        assert deviation(predictable_model(), request, answer) < 2e-5
    drafted = engine.statistics.drafted_D
    assert 0 < drafted[1] < drafted[0] < engine.statistics.generated_tokens, "only one number was tried"
