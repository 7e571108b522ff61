"""The global gradient norm, each gradient counted once, and clipping by it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from steptron.parallel.gradient_buffer import DataParallel
from steptron.parallel.mesh import Mesh

_CHUNK_ELEMENTS = 1 << 16
"""Elements whose squares are added in fp32. torch's norm on CPU adds them one after the other: it is
short by 1e-5 at a million elements and by 1e-2 at a hundred million, by 1e-7 at this length."""


@torch.no_grad()
def gradient_norm(model: DataParallel, mesh: Mesh) -> float:
    """Norm over every gradient of the whole model.

    Data-parallel ranks hold equal gradients and count once; stages add up; experts add up over the
    expert-parallel ranks too; the last stage's copy of the embedding does not count. Squares are
    added in float64.
    """
    device = model.buffers[0].data.device
    squares = torch.stack([_sum_of_squares(gradients, device) for gradients in model.norm_gradients])
    squares[1] = _add_up(squares[1:], mesh.groups.ep)[0]
    return float(_add_up(squares, mesh.groups.pp).sum().sqrt())


@torch.no_grad()
def clip_gradients(model: DataParallel, norm: float, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm when the norm is larger."""
    if norm > max_norm:
        for buffer in model.buffers:
            buffer.data.mul_(max_norm / (norm + 1e-6))


def _sum_of_squares(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    chunks = [chunk for gradient in gradients for chunk in gradient.view(-1).split(_CHUNK_ELEMENTS)]
    if not chunks:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(chunks)).double().square().sum()


def _add_up(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over a group in the order of its ranks, so that every replica gets the same bits."""
    if group.size() == 1:
        return values
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(gathered, values.contiguous(), group=group)
    return torch.stack(gathered).sum(dim=0)
