"""The logical tensors of a checkpoint: the same keys under every layout.

A stored parameter may hold several logical matrices (query, key, value and gate; gate and up): each
has its own key. Tensor-parallel ranks hold rows or columns of it; experts are stacked along axis 0 over all
expert-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from steptron.checkpoint.boxes import boxes
from steptron.model.chunks import ModelChunks
from steptron.model.layer_spec import ParameterSpec
from steptron.model.parameter_shards import Cut, MatrixShard, cut_of, shard
from steptron.optim.base import Optimizer, StateTensor
from steptron.parallel.mesh import Mesh
from steptron.platform.random_state import random_states


def model_tensors(model: ModelChunks, mesh: Mesh) -> dict[str, ShardedTensor]:
    """Parameters and router biases of this process, by key ``model.<logical name>``."""
    tensors = {name: tensor.detach() for name, tensor in model.logical_tensors()}
    return _sharded("model", tensors, model, mesh)


def optimizer_tensors(optimizer: Optimizer) -> dict[str, ShardedTensor]:
    """What this process owns of the optimizer's state, by key ``optimizer.<kind>.<logical name>``; of what is cut into
    several parts on one process each has a number after its key here, and the same key in the checkpoint."""
    sharded: dict[str, ShardedTensor] = {}
    for kind, tensors in optimizer.state().items():
        for state in tensors:
            for part in _parts_of_run(f"optimizer.{kind}", state):
                sharded[f"{part.key}#{len(sharded)}"] = part
    return sharded


def random_tensors() -> dict[str, ShardedTensor]:
    """The states of this process's random generators, by key ``random.<generator>``: a row for each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        f"random.{name}": ShardedTensor.from_rank_offsets(f"random.{name}", state.unsqueeze(0), (0, rank, size))
        for name, state in random_states().items()
    }


def matrix_name(key: str) -> str:
    """The logical matrix that a key of a checkpoint belongs to."""
    return key.split(".", 1 if key.startswith("model.") else 2)[-1]


def _parts_of_run(prefix: str, state: StateTensor) -> Iterator[ShardedTensor]:
    """The rectangles of logical matrices that a run of a parameter's flattened tensor consists of."""
    piece = state.owned.piece
    shard, row_axis = piece.shard, 1 if piece.shard.parameter.is_expert else 0
    for box in boxes(shard.shape, piece.start, piece.stop):
        data = state.tensor[box.start - piece.start :][: math.prod(box.shape)].view(box.shape)
        first_row, stop_row = box.offset[row_axis], box.offset[row_axis] + box.shape[row_axis]
        for part in shard.matrices:
            low, high = max(first_row, part.rows[0]), min(stop_row, part.rows[1])
            if low >= high:
                continue  # rows that fill a vocabulary up belong to no matrix
            offset = list(box.offset)
            offset[row_axis] = low - part.rows[0]
            offset[part.axis] += part.range[0]
            view = data.narrow(row_axis, low - first_row, high - low)
            yield ShardedTensor(
                f"{prefix}.{part.matrix.name}",
                view,
                view.dtype,
                tuple(view.shape),
                shard.parameter.matrix_shape(part.matrix),
                tuple(offset),
                axis_fragmentations=None,
                replica_id=int(state.owned.is_copy),
            )


def _sharded(
    prefix: str, tensors: Mapping[str, torch.Tensor], model: ModelChunks, mesh: Mesh
) -> dict[str, ShardedTensor]:
    sharded = {}
    for parameter in model.spec.parameters():
        if parameter.name not in tensors:
            continue
        replica = _replica(parameter, model, mesh)
        row_axis = 1 if parameter.is_expert else 0
        for part in shard(parameter, mesh.place).matrices:
            key = f"{prefix}.{part.matrix.name}"
            start, stop = part.rows
            view = tensors[parameter.name].narrow(row_axis, start, stop - start)
            sharded[key] = _part_of_whole(key, view, part, replica)
    return sharded


def _part_of_whole(key: str, view: torch.Tensor, part: MatrixShard, replica: tuple[int, int, int]) -> ShardedTensor:
    if part.is_even:
        return ShardedTensor.from_rank_offsets(key, view, (part.axis, part.index, part.count), replica_id=replica)
    # A vocabulary whose last part is shorter: stored without the rows that fill it up.
    shape, offset = list(view.shape), [0] * view.ndim
    shape[part.axis], offset[part.axis] = part.extent, part.range[0]
    return ShardedTensor(
        key,
        view,
        view.dtype,
        tuple(view.shape),
        tuple(shape),
        tuple(offset),
        axis_fragmentations=None,
        replica_id=replica,
    )


def _replica(parameter: ParameterSpec, model: ModelChunks, mesh: Mesh) -> tuple[int, int, int]:
    """Tells the ranks apart that hold the same part; all zeros for the one that writes it."""
    cut = cut_of(parameter.role)
    if cut is Cut.EXPERTS:
        return (0, 0, mesh.groups.expt_dp.rank())
    copy = int(parameter.name == "embedding.weight" and model.embedding_is_copy)
    return (copy, mesh.tensor_rank if cut is Cut.NONE else 0, mesh.groups.dp_cp.rank())
