"""The global gradient norm, each gradient counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from steptron.optim.owned import OwnedPiece

_CHUNK_ELEMENTS = 1 << 16
"""Elements whose squares are added in fp32. torch's norm on CPU adds them one after the other: it is
short by 1e-5 at a million elements and by 1e-2 at a hundred million, by 1e-7 at this length."""


@torch.no_grad()
def gradient_norm(owned: Iterable[OwnedPiece], device: torch.device) -> float:
    """Norm over every gradient of the whole model, a float32 number.

    Every gradient has one owner, who counts it; of the two stages that have the embedding the first one does. Squares
    are added in float64 and the norm is rounded to float32, so that it does not depend on who owns what.

    Args:
        owned: what this rank owns, whose gradients are reduced; may be nothing.
        device: what collectives work on.
    """
    own = _sum_of_squares([piece.gradient for piece in owned if not piece.is_copy], device)
    return float(_add_up(own).sqrt().float())


@torch.no_grad()
def clip_gradients(owned: Iterable[OwnedPiece], norm: float, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm when the norm is larger."""
    gradients = [piece.gradient for piece in owned]
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def _sum_of_squares(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    chunks = [chunk for gradient in gradients for chunk in gradient.split(_CHUNK_ELEMENTS)]
    if not chunks:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(chunks)).double().square().sum()


def _add_up(values: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks in their order, so that every one gets the same bits."""
    if dist.get_world_size() == 1:
        return values
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered).sum(dim=0)
