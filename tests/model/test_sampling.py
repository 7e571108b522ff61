"""Sampling against the distributions it should draw from."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from steptron.model.assembly import StepModel
from steptron.model.sampling import _choose, sample_tokens
from tests.model.helpers import build_model, fill, random_batch, small_config

LOGITS = torch.tensor([2.0, -1.0, 0.5, 2.5, -3.0, 1.0])


@pytest.fixture(scope="module")
def model() -> StepModel:
    model = build_model(small_config())
    fill(model, seed=0)
    return model


def next_logits(model: StepModel, tokens: list[int]) -> torch.Tensor:
    batch = random_batch(48, 1, len(tokens), seed=0)
    batch.tokens_BS.copy_(torch.tensor([tokens]))
    with torch.no_grad():
        return model.logits(batch)[0][0, -1]


def test_temperature_zero_takes_the_likeliest_token(model: StepModel) -> None:
    tokens = [3, 1, 4]
    sampled = list(sample_tokens(model, tokens, 6, temperature=0))
    for token in sampled:
        assert token == int(next_logits(model, tokens).argmax())
        tokens.append(token)
    assert len(sampled) == 6


def test_the_seed_decides(model: StepModel) -> None:
    first, again, other = (list(sample_tokens(model, [5, 6], 20, seed=seed)) for seed in (1, 1, 2))
    assert first == again and first != other
    torch.manual_seed(123)  # the global generator does not
    assert list(sample_tokens(model, [5, 6], 20, seed=1)) == first


def test_stop_token_ends_the_text_and_is_not_part_of_it(model: StepModel) -> None:
    free = list(sample_tokens(model, [7], 12, seed=3))
    stop = free[5]
    assert list(sample_tokens(model, [7], 12, seed=3, stop_token=stop)) == free[: free.index(stop)]


def test_number_of_tokens(model: StepModel) -> None:
    assert list(sample_tokens(model, [1], 0)) == []
    assert len(list(sample_tokens(model, [1], 3))) == 3


def test_an_empty_prompt_is_refused(model: StepModel) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(sample_tokens(model, [], 3))


def test_the_prompt_is_left_alone_and_gradients_stay_on_outside(model: StepModel) -> None:
    prompt = [1, 2]
    stream = sample_tokens(model, prompt, 3)
    next(stream)
    assert torch.is_grad_enabled() and prompt == [1, 2]


def frequencies(temperature: float, top_p: float, draws: int = 4000) -> Counter[int]:
    generator = torch.Generator().manual_seed(0)
    return Counter(_choose(LOGITS, temperature, top_p, generator) for _ in range(draws))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.6, 0.9, 0.99, 1.0])
def test_tokens_come_from_the_nucleus_with_their_probabilities(temperature: float, top_p: float) -> None:
    exponentials = [math.exp(logit / temperature) for logit in LOGITS.tolist()]
    probabilities = [value / sum(exponentials) for value in exponentials]
    nucleus, reached = [], 0.0
    for token in sorted(range(6), key=lambda token: -probabilities[token]):
        if nucleus and reached >= top_p:
            break
        nucleus.append(token)
        reached += probabilities[token]
    counts = frequencies(temperature, top_p)
    assert set(counts) <= set(nucleus)
    for token in nucleus:
        expected = probabilities[token] / reached
        error = math.sqrt(expected * (1 - expected) / 4000)
        assert abs(counts[token] / 4000 - expected) <= 5 * error + 1e-12


def test_a_very_peaked_distribution_keeps_its_first_token() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1000.0, -1000.0])
    assert {_choose(logits, 1.0, 0.5, generator) for _ in range(20)} == {1}
