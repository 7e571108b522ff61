"""From logits to tokens: temperature and truncation, reproducible draws, and the acceptance of drafted tokens."""

from __future__ import annotations

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
    tokens_R = torch.searchsorted(sums_RV, wanted_R1, right=True)[:, 0]
    # Rounding may lead beyond the last token that has a weight.
    last_R = p_RV.shape[1] - 1 - (p_RV.flip(1) > 0).int().argmax(dim=1)
    found: list[int] = torch.minimum(tokens_R, last_R).tolist()
    return found


def verify(
    target_QV: Tensor, draft_tokens: Sequence[int], draft_DV: Tensor | None, seed: int, place: int
) -> tuple[list[int], int]:
    """The next tokens of a sequence, given what was drafted: distributed as if each had been sampled by itself.

    A drafted token d is accepted with probability min(1, p(d) / q(d)); the first that is not is replaced by one drawn
    in proportion to max(p - q, 0); after the last accepted one, one more is sampled (Leviathan et al. 2023, arXiv
    2211.17192, algorithm 1).

    Args:
        target_QV: log-probabilities p for each of the D + 1 places.
        draft_tokens: the D drafted tokens.
        draft_DV: log-probabilities q that they were drawn with; None without drafts.
        seed: of the sequence.
        place: of the first of the tokens in the sequence.

    Returns:
        The tokens, at least one, and how many of them were drafted.
    """
    tokens: list[int] = []
    for number, token in enumerate(draft_tokens):
        assert draft_DV is not None
        p, q = float(target_QV[number, token].exp()), float(draft_DV[number, token].exp())
        if uniform(seed, place + number, ACCEPT) * q < p:
            tokens.append(token)
            continue
        rest_V = (target_QV[number].exp() - draft_DV[number].exp()).clamp_min(0)
        if not rest_V.any():  # p and q differ by rounding alone
            rest_V = target_QV[number].exp()
        tokens += draw(rest_V[None], [uniform(seed, place + number, SAMPLE)])
        return tokens, number
    last = len(draft_tokens)
    tokens += draw(target_QV[last : last + 1].exp(), [uniform(seed, place + last, SAMPLE)])
    return tokens, last
