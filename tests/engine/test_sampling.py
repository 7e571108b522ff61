"""Distributions after temperature and truncation, reproducible draws, and the rule by which drafts are accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from steptron.engine import sampling as module
from steptron.engine.sampling import ACCEPT, DRAFT, SAMPLE, Draft, Sampling, draw, log_probabilities, uniform, verify

LOGITS = torch.tensor([2.0, 1.0, 0.5, 1.0, -3.0, 0.0, 1.9, -1.0])


def chi_square_p(seen: np.ndarray, expected: np.ndarray) -> float:
    """Probability of so large a deviation, or a larger one, by chance (Pearson's test)."""
    statistic = float(((seen - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((seen.size - 1) / 2), torch.tensor(statistic / 2)))


def reference(logits: list[float], one: Sampling) -> list[float]:
    """Slow and literal, in float64."""
    if one.temperature == 0:
        best = logits.index(max(logits))
        return [1.0 if token == best else 0.0 for token in range(len(logits))]
    weights = [math.exp(value / one.temperature) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])

    def normed() -> None:
        total = sum(weights)
        weights[:] = [weight / total for weight in weights]

    normed()
    if one.top_k:
        for token in order[one.top_k :]:
            weights[token] = 0.0
        normed()
    if one.top_p < 1:
        before = 0.0
        for rank, token in enumerate(order):
            own = weights[token]
            if rank and before >= one.top_p:
                weights[token] = 0.0
            before += own
        normed()
    limit = one.min_p * max(weights)
    weights[:] = [weight if weight >= limit else 0.0 for weight in weights]
    normed()
    return weights


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_probabilities_equal_the_slow_reference(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    one = Sampling(temperature, top_k, top_p, min_p)
    others = [Sampling(), Sampling(0.0), Sampling(0.5, 2, 0.7, 0.1)]
    rows = log_probabilities(LOGITS.repeat(4, 1), [others[0], one, *others[1:]])
    for row, each in zip(rows, [others[0], one, *others[1:]], strict=True):
        np.testing.assert_allclose(row.double().exp(), reference(LOGITS.tolist(), each), atol=2e-7)


def test_uniform_numbers_depend_on_seed_place_and_purpose_alone() -> None:
    numbers = {
        uniform(seed, place, purpose)
        for seed in (0, 1, 2**64 - 1)
        for place in range(50)
        for purpose in (SAMPLE, ACCEPT, DRAFT)
    }
    assert len(numbers) == 450 and all(0 <= number < 1 for number in numbers)
    assert uniform(7, 3, SAMPLE) == uniform(7, 3, SAMPLE)
    counts, _ = np.histogram([uniform(5, place, ACCEPT) for place in range(4_000)], bins=20, range=(0, 1))
    assert chi_square_p(counts, np.full(20, 200.0)) > 1e-3


def test_draws_have_the_weights_of_their_tokens() -> None:
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    tokens = draw(weights.repeat(8_000, 1), [(number + 0.5) / 8_000 for number in range(8_000)])
    assert np.bincount(tokens, minlength=6).tolist() == [0, 3_000, 0, 1_000, 4_000, 0]
    assert draw(weights[None], [0.0]) == [1]
    assert draw(weights[None], [1 - 2.0**-53]) == [4]


def _rows(seed: int, count: int, sharpness: float = 1.0) -> torch.Tensor:
    noise = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (noise * sharpness).log_softmax(dim=-1)


def _drafts(tokens: list[int], log_q_DV: torch.Tensor) -> list[Draft]:
    return [Draft(token, row, float(row[token])) for token, row in zip(tokens, log_q_DV, strict=True)]


def _outcomes(accept: float = 1.0, count: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    """How often each pair of first two tokens comes out of two drafts, and the expected numbers.

    Every context has the same distributions, so that the pair's probability is a product.
    """
    target, drafts = _rows(0, 3), _rows(1, 2)
    seeds = list(range(count))
    first, second = (
        draw(drafts[k].exp().expand(count, -1), [uniform(seed, 10 + k, DRAFT) for seed in seeds]) for k in range(2)
    )
    drafted = [_drafts([*pair], drafts + math.log(accept)) for pair in zip(first, second, strict=True)]
    seen = np.zeros((6, 6))
    answers = verify(target.repeat(count, 1), drafted, seeds, [10] * count)
    alone = draw(target[1].exp().expand(count, -1), [uniform(seed, 11, SAMPLE) for seed in seeds])
    for (tokens, accepted), pair, later in zip(answers, zip(first, second, strict=True), alone, strict=True):
        assert len(tokens) == accepted + 1 and tokens[:accepted] == [*pair][:accepted]
        seen[tokens[0], tokens[1] if len(tokens) > 1 else later] += 1
    p = target.exp().numpy()
    return seen.flatten(), (np.outer(p[0], p[1]) * count).flatten()


def test_drafts_leave_the_distribution_as_it_is() -> None:
    seen, expected = _outcomes()
    assert chi_square_p(seen, expected) > 1e-3


def test_a_wrong_rule_of_acceptance_is_seen() -> None:
    """Drafts that are accepted a fifth more often than they should be."""
    seen, expected = _outcomes(accept=1 / 1.2)
    assert chi_square_p(seen, expected) < 1e-6


def test_replacing_by_the_target_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a rejection comes from max(p - q, 0), not from p."""
    original = draw
    target = _rows(0, 3)[0].exp()

    def from_the_target(p_RV: torch.Tensor, uniforms: list[float]) -> list[int]:
        rests = (p_RV.sum(dim=1) < 0.999)[:, None]
        return original(torch.where(rests, target, p_RV), uniforms)

    monkeypatch.setattr(module, "draw", from_the_target)
    seen, expected = _outcomes()
    assert chi_square_p(seen, expected) < 1e-6


def test_greedy_drafts_are_accepted_exactly_where_they_are_right() -> None:
    target = log_probabilities(_rows(0, 3).float(), [Sampling(0.0)] * 3)
    best = target.argmax(dim=-1).tolist()
    wrong = (best[1] + 1) % 6
    one_hot = torch.full((6,), -math.inf)
    one_hot[wrong] = 0.0
    right = Draft(best[0], target[0], 0.0)
    drafts = [[right, Draft(best[1], target[1], 0.0)], [right, Draft(wrong, one_hot, 0.0)], []]
    rows = torch.cat([target, target, target[:1]])
    assert verify(rows, drafts, [3, 4, 5], [5, 6, 7]) == [(best, 2), (best[:2], 1), (best[:1], 0)]


def test_equal_distributions_accept_every_draft() -> None:
    rows = _rows(4, 2)
    for seed in range(200):
        token = draw(rows[:1].exp(), [uniform(seed, 0, DRAFT)])
        assert verify(rows, [_drafts(token, rows[:1])], [seed], [0])[0][1] == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, float], said: str) -> None:
    (problem,) = Sampling(**fields).problems()  # type: ignore[arg-type]
    assert problem.startswith(said)
