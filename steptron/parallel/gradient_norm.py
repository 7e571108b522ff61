"""The global gradient norm, each gradient counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from steptron.optim.owned import OwnedPiece

_CHUNK_ELEMENTS = {"cpu": 1 << 15}
"""Gradients that are widened to float64 at once, by type of device: as many as stay in a core's cache."""
_LARGE_CHUNK = 1 << 24
"""On other devices: few kernels."""


@torch.no_grad()
def gradient_norm(
    owned: Iterable[OwnedPiece], device: torch.device, along: torch.Tensor | None = None
) -> tuple[float, float]:
    """Norm over every gradient of the whole model, a float32 number.

    Every gradient has one owner, who counts it; of the two stages that have the embedding the first one does. Squares
    are added in float64 and the norm is rounded to float32, so that it does not depend on who owns what.

    Args:
        owned: what this rank owns, whose gradients are reduced; may be nothing.
        device: what collectives work on.
        along: a number that is added up over all ranks in the same collective.

    Returns:
        The norm, and the sum of ``along``.
    """
    own = _sum_of_squares([piece.gradient for piece in owned if not piece.is_copy], device)
    brought = torch.zeros_like(own) if along is None else along.to(own)
    squares, total = _add_up(torch.stack([own, brought])).unbind()
    return float(squares.sqrt().float()), float(total)


@torch.no_grad()
def clip_gradients(owned: Iterable[OwnedPiece], norm: float, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm when the norm is larger."""
    gradients = [piece.gradient for piece in owned]
    if norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def _sum_of_squares(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """In float64 throughout: its rounding, 1e-13 or so, is lost when the norm is rounded to float32, and with it
    where gradients were cut."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    longest = min(_CHUNK_ELEMENTS.get(device.type, _LARGE_CHUNK), max(map(torch.Tensor.numel, gradients), default=0))
    wide = torch.empty(longest, dtype=torch.float64, device=device)
    for gradient in gradients:
        for chunk in gradient.split(max(1, longest)):
            own = wide[: chunk.numel()].copy_(chunk)
            total += torch.dot(own, own)
    return total


def _add_up(values: torch.Tensor) -> torch.Tensor:
    """Sum over all ranks in their order, so that every one gets the same bits."""
    if dist.get_world_size() == 1:
        return values
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered).sum(dim=0)
