"""A small model to generate with, and what training says of the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from steptron.data.batch import MicroBatch
from steptron.engine.request import GeneratedToken, Request
from steptron.engine.sampling import Sampling
from steptron.model.assembly import StepModel
from tests.model.helpers import build_model, fill, small_config

VOCABULARY = 48
WINDOW = 4


@cache
def small_model(seed: int = 0) -> StepModel:
    """Five layers, two of them full, two MTP depths; nobody may change its weights."""
    return new_model(seed)


def new_model(seed: int = 0) -> StepModel:
    """As ``small_model``, for one test alone."""
    model = build_model(small_config())
    fill(model, seed)
    model.eval()
    return model


@cache
@torch.no_grad()
def predictable_model() -> StepModel:
    """Mostly goes from each token to a certain other one, as its MTP depths know: drafts are often right."""
    model = new_model(7)
    successor_V = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    embedding, heads = model.embedding.weight, [model.head.weight, *(model.mtp_head(k) for k in range(2))]
    embedding.mul_(3.0)
    for head in heads:
        head[successor_V] = 0.3 * embedding
    for depth in model.running_depths():
        hidden = embedding.shape[1]
        depth.projection.weight.mul_(0.3)
        depth.projection.weight[:, :hidden] += torch.eye(hidden)
    return model


@torch.no_grad()
def training_forward(model: StepModel, tokens: Sequence[int]) -> Tensor:
    """Log-probabilities [T, V] of the token after each, by the forward pass of training."""
    tokens_BS = torch.tensor([list(tokens)])
    zeros = torch.zeros_like(tokens_BS)
    logits = model.logits(MicroBatch(tokens_BS, zeros, zeros.bool(), torch.arange(len(tokens))[None], zeros))
    assert isinstance(logits, tuple)
    return logits[0][0].log_softmax(dim=-1)


def deviation(model: StepModel, request: Request, answer: Sequence[GeneratedToken]) -> float:
    """Largest difference between the log-probabilities that the engine reports and those of training."""
    expected_TV = training_forward(model, [*request.prompt, *(one.token for one in answer)])
    first = len(request.prompt) - 1
    return max(
        abs(float(expected_TV[first + place, one.token]) - one.raw_log_probability) for place, one in enumerate(answer)
    )


def random_requests(count: int, seed: int = 0, longest_prompt: int = 60, **fields: object) -> list[Request]:
    """Prompts and answers of all lengths, some greedy."""
    draw = random.Random(seed)
    return [
        Request(
            tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest_prompt))),
            Sampling(seed=number, temperature=draw.choice([0.0, 0.7, 1.0])),
            **{"max_tokens": draw.randint(1, 40), **fields},  # type: ignore[arg-type]
        )
        for number in range(count)
    ]
