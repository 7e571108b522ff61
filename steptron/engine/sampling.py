"""From logits to tokens: temperature and truncation, reproducible draws, and the acceptance of drafted tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What a uniform number is drawn for; two purposes at one place never share theirs.
SAMPLE, ACCEPT, DRAFT = 0, 1, 2


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Filters act one after the other, each on what the one before has left, renormalised: temperature, ``top_k``,
    ``top_p``, ``min_p``.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: so many of the likeliest tokens; 0 takes all.
        top_p: the fewest of the likeliest tokens whose probability reaches this.
        min_p: tokens at least so likely, relative to the likeliest.
        seed: of the draws; the same seed, model and versions give the same answer, whatever else is computed beside it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def problems(self) -> list[str]:
        """What is wrong with it."""
        found = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(f"temperature is {self.temperature}: it is a number from 0 up")
        if self.top_k < 0:
            found.append(f"top_k is {self.top_k}: it is 0 (all tokens) or a number of tokens")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p is {self.top_p}: it is above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            found.append(f"min_p is {self.min_p}: it is between 0 and 1")
        if not 0 <= self.seed < 2**64:
            found.append(f"seed is {self.seed}: it is a whole number from 0 to 2^64 - 1")
        return found


def log_probabilities(logits_RV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Log-probabilities [R, V] that tokens are sampled with, -inf for those that are cut off.

    With temperature 0 the likeliest token has probability 1 (of equals the first).

    Args:
        logits_RV: float32, one row for each of ``sampling``.
    """
    cold = [row for row, one in enumerate(sampling) if one.temperature == 0]
    temperature_R1 = logits_RV.new_tensor([[one.temperature or 1.0] for one in sampling])
    result_RV = torch.log_softmax(logits_RV / temperature_R1, dim=-1)
    cut = [row for row, one in enumerate(sampling) if one.temperature and (one.top_k or one.top_p < 1 or one.min_p)]
    if cut:
        result_RV[cut] = _truncated(result_RV[cut], [sampling[row] for row in cut])
    if cold:
        chosen_C1 = logits_RV[cold].argmax(dim=-1, keepdim=True)
        result_RV[cold] = torch.full_like(result_RV[cold], -math.inf).scatter_(1, chosen_C1, 0.0)
    return result_RV


def _truncated(log_p_RV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    sorted_RV, order_RV = log_p_RV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(log_p_RV.shape[1], device=log_p_RV.device)
    top_k_R1 = ranks_V.new_tensor([[one.top_k or log_p_RV.shape[1]] for one in sampling])
    sorted_RV = sorted_RV.masked_fill(ranks_V >= top_k_R1, -math.inf).log_softmax(dim=-1)
    p_RV = sorted_RV.exp()
    # A token stays while the probability of those before it has not reached top_p; the first always.
    before_RV = p_RV.double().cumsum(dim=-1) - p_RV
    top_p_R1 = before_RV.new_tensor([[one.top_p] for one in sampling])
    cut_RV = (before_RV >= top_p_R1) & (top_p_R1 < 1)
    cut_RV[:, 0] = False
    sorted_RV = sorted_RV.masked_fill(cut_RV, -math.inf).log_softmax(dim=-1)
    min_p_R1 = sorted_RV.new_tensor([[one.min_p] for one in sampling])
    sorted_RV = sorted_RV.masked_fill(sorted_RV.exp() < min_p_R1 * sorted_RV[:, :1].exp(), -math.inf).log_softmax(
        dim=-1
    )
    return torch.empty_like(sorted_RV).scatter_(1, order_RV, sorted_RV)


def uniform(seed: int, place: int, purpose: int) -> float:
    """A number in [0, 1) that depends on nothing else: Philox (Salmon et al., SC 2011), these its key and counter."""
    key, counter = np.array([seed, purpose], np.uint64), np.array([place, 0, 0, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def draw(p_RV: Tensor, uniforms: Sequence[float]) -> list[int]:
    """For each row a token with a probability in proportion to its weight, by inversion of the sums of weights.

    Args:
        p_RV: weights, at least one of a row positive.
        uniforms: a number in [0, 1) for each row.
    """
    sums_RV = p_RV.double().cumsum(dim=-1)
    wanted_R1 = sums_RV[:, -1:] * sums_RV.new_tensor(uniforms)[:, None]
    tokens_R1 = torch.searchsorted(sums_RV, wanted_R1, right=True).clamp_max_(p_RV.shape[1] - 1)
    found: list[int] = tokens_R1[:, 0].tolist()
    # Rounding may lead beyond the last token that has a weight.
    for row in (p_RV.gather(1, tokens_R1)[:, 0] <= 0).nonzero()[:, 0].tolist():
        found[row] = int(p_RV[row].nonzero()[-1])
    return found


@dataclass(frozen=True)
class Draft:
    """A token that may follow.

    Attributes:
        token: its id.
        log_q_V: log-probabilities that it was drawn with.
        log_q: its own.
    """

    token: int
    log_q_V: Tensor
    log_q: float


def verify(
    log_p_NV: Tensor, drafts: Sequence[Sequence[Draft]], seeds: Sequence[int], places: Sequence[int]
) -> list[tuple[list[int], int]]:
    """The next tokens of sequences, given what was drafted: distributed as if each had been sampled by itself.

    A drafted token d is accepted with probability min(1, p(d) / q(d)); the first that is not is replaced by one drawn
    in proportion to max(p - q, 0); after the last accepted one, one more is sampled (Leviathan et al. 2023, arXiv
    2211.17192, algorithm 1).

    Args:
        log_p_NV: log-probabilities p: for each sequence a row for every draft and one more.
        drafts: of each sequence; none at all is allowed.
        seeds: of the sequences.
        places: of the first of the tokens in each sequence.

    Returns:
        For each sequence its tokens, at least one, and how many of them were drafted.
    """
    begins = [0, *itertools.accumulate(len(own) + 1 for own in drafts)]
    rows = [begin + k for begin, own in zip(begins, drafts, strict=False) for k in range(len(own))]
    log_p = iter(log_p_NV[rows, [draft.token for own in drafts for draft in own]].tolist())
    accepted = []
    for own, seed, place in zip(drafts, seeds, places, strict=True):
        chances = [math.exp(min(0.0, next(log_p) - draft.log_q)) for draft in own]
        lucky = [uniform(seed, place + k, ACCEPT) < chance for k, chance in enumerate(chances)]
        accepted.append(next((k for k, is_lucky in enumerate(lucky) if not is_lucky), len(own)))
    p_RV = log_p_NV[[begin + count for begin, count in zip(begins, accepted, strict=False)]].exp()
    for row, (own, count) in enumerate(zip(drafts, accepted, strict=True)):
        if count < len(own):
            rest_V = (p_RV[row] - own[count].log_q_V.exp()).clamp_min_(0)
            if rest_V.any():  # else p and q differ by rounding alone
                p_RV[row] = rest_V
    uniforms = [uniform(seed, place + n, SAMPLE) for seed, place, n in zip(seeds, places, accepted, strict=True)]
    last = draw(p_RV, uniforms)
    return [
        ([*(draft.token for draft in own[:count]), token], count)
        for own, count, token in zip(drafts, accepted, last, strict=True)
    ]
