"""The global gradient norm, each gradient counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from steptron.model.parameter_shards import Cut
from steptron.parallel.gradient_buffer import DataParallel
from steptron.parallel.mesh import Mesh

_CHUNK_ELEMENTS = 1 << 16
"""Elements whose squares are added in fp32. torch's norm on CPU adds them one after the other: it is
short by 1e-5 at a million elements and by 1e-2 at a hundred million, by 1e-7 at this length."""


@torch.no_grad()
def gradient_norm(model: Sequence[DataParallel], mesh: Mesh, device: torch.device) -> float:
    """Norm over every gradient of the whole model.

    Ranks that hold equal gradients count once; stages add up; parameters cut by tensor parallelism add up
    over those ranks, experts over the expert-parallel ranks; the last stage's copy of the embedding does not
    count. Squares are added in float64.

    Args:
        model: this rank's chunks, whose gradients are reduced; a chunk may have none.
        mesh: the process groups.
        device: what their collectives work on.
    """
    by_cut = {
        cut: _sum_of_squares([gradient for chunk in model for gradient in chunk.norm_gradients.get(cut, [])], device)
        for cut in Cut
    }
    cut_by_tensor = _add_up(by_cut[Cut.ROWS] + by_cut[Cut.COLUMNS], mesh.groups.tp)
    experts = _add_up(by_cut[Cut.EXPERTS], mesh.groups.ep)
    return float(_add_up(by_cut[Cut.NONE] + cut_by_tensor + experts, mesh.groups.pp).sqrt())


@torch.no_grad()
def clip_gradients(model: Sequence[DataParallel], norm: float, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm when the norm is larger."""
    if norm > max_norm:
        for chunk in model:
            for buffer in chunk.buffers:
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
