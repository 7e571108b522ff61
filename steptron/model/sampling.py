"""Sampling text from a model, one full forward pass per token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel


@torch.no_grad()
def sample_tokens(
    model: StepModel,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_token: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yields sampled tokens.

    Args:
        model: a whole model (one stage) in evaluation mode.
        prompt: token ids, at least one.
        max_new_tokens: most tokens to sample.
        temperature: 0 takes the likeliest token.
        top_p: smallest set of likeliest tokens whose probability reaches this is sampled from.
        stop_token: sampling ends before this token is yielded.
        seed: of the sampling.

    Raises:
        ValueError: the prompt is empty.
    """
    if not prompt:
        raise ValueError("the prompt must hold at least one token")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        main_BSV, _ = model.logits(_batch(tokens, device))
        token = _choose(main_BSV[0, -1].float().cpu(), temperature, top_p, generator)
        if token == stop_token:
            return
        tokens.append(token)
        yield token


def _choose(logits_V: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, tokens_V = (logits_V / temperature).softmax(dim=-1).sort(descending=True)
    # A token stays while the probability of those before it has not reached top_p; the first always.
    keep_V = probabilities_V.cumsum(dim=-1) - probabilities_V < top_p
    keep_V[0] = True
    choice = torch.multinomial(probabilities_V * keep_V, 1, generator=generator)
    return int(tokens_V[choice])


def _batch(tokens: list[int], device: torch.device) -> MicroBatch:
    tokens_BS = torch.tensor([tokens], device=device)
    zeros = torch.zeros_like(tokens_BS)
    positions_BS = torch.arange(len(tokens), device=device).unsqueeze(0)
    return MicroBatch(tokens_BS, zeros, zeros.bool(), positions_BS, zeros)
