"""MTP depths that begin as copies of the nearest one."""

from __future__ import annotations

import torch

from steptron.checkpoint.fit import Fit
from steptron.checkpoint.loading import start_masters
from steptron.model.chunks import ModelChunks
from steptron.optim.base import Optimizer
from steptron.parallel.mesh import Mesh


@torch.no_grad()
def clone_mtp(chunks: ModelChunks, optimizer: Optimizer, mesh: Mesh, depths: int) -> None:
    """Copies the first MTP depth to all others of the ``depths`` that train; what the optimizer keeps of these begins
    with their new weights. (All depths lie on one stage, and ranks cut them alike.)"""
    spec = chunks.spec
    others = range(1, depths)
    Fit((), tuple(others), ()).fill(dict(chunks.logical_tensors()), spec, mesh.place, None)
    copied = [parameter for depth in others for parameter in spec.mtp[depth].parameters()]
    start_masters(optimizer, {matrix.name for parameter in copied for matrix in parameter.matrices})
