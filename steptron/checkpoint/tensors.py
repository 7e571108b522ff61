"""The logical tensors of a checkpoint: the same keys under every layout.

A stored parameter may hold several logical matrices (query, key, value and gate; gate and up): each
has its own key. Experts are stacked along axis 0 over all expert-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from steptron.model.assembly import StepModel
from steptron.model.layer_spec import ParameterSpec
from steptron.optim.base import Optimizer
from steptron.parallel.mesh import Mesh


def model_tensors(module: StepModel, mesh: Mesh) -> dict[str, ShardedTensor]:
    """Parameters and router biases of this process, by key ``model.<logical name>``."""
    tensors = {name: tensor.detach() for name, tensor in module.logical_tensors()}
    return _sharded("model", tensors, module, mesh)


def optimizer_tensors(optimizer: Optimizer, module: StepModel, mesh: Mesh) -> dict[str, ShardedTensor]:
    """Optimizer state of this process, by key ``optimizer.<kind>.<logical name>``."""
    sharded: dict[str, ShardedTensor] = {}
    for kind, tensors in optimizer.state().items():
        sharded |= _sharded(f"optimizer.{kind}", tensors, module, mesh)
    return sharded


def _sharded(
    prefix: str, tensors: Mapping[str, torch.Tensor], module: StepModel, mesh: Mesh
) -> dict[str, ShardedTensor]:
    sharded = {}
    for parameter in module.spec.parameters():
        if parameter.name not in tensors:
            continue
        for name, view in _logical_views(parameter, tensors[parameter.name]):
            key = f"{prefix}.{name}"
            if parameter.is_expert:
                experts = (0, mesh.expert_rank, mesh.expert_size)
                replica = (0, 0, mesh.groups.expt_dp.rank())
                sharded[key] = ShardedTensor.from_rank_offsets(key, view, experts, replica_id=replica)
            else:
                copy = int(parameter.name == "embedding.weight" and module.embedding_is_copy)
                replica = (copy, 0, mesh.groups.dp_cp.rank())
                sharded[key] = ShardedTensor.from_rank_offsets(key, view, replica_id=replica)
    return sharded


def _logical_views(parameter: ParameterSpec, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    row_axis = 1 if parameter.is_expert else 0
    for matrix in parameter.matrices:
        start, stop = matrix.rows
        yield matrix.name, tensor.narrow(row_axis, start, stop - start)
