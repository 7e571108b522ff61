"""The optimizer's table of a whole run, gathered before anything is allocated for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from steptron.config.schema import PretrainConfig
from steptron.model.chunks import ModelChunks
from steptron.model.parameter_shards import shard
from steptron.model.transformer_config import DTYPES
from steptron.optim.buffer_plan import BufferPlan
from steptron.optim.table import Holding, console_lines, holding, in_model_order, merge, to_tsv
from steptron.parallel.mesh import Mesh
from steptron.platform.distributed import on_first_rank

TABLE_NAME = "parameters.tsv"
"""Name of the table in a run's output folder."""


def report_ownership(
    config: PretrainConfig, chunks: ModelChunks, plans: Sequence[BufferPlan], mesh: Mesh
) -> str | None:
    """Writes the whole table to ``parameters.tsv`` in the run's folder. Every rank must call it.

    Returns:
        The table in short, on the first rank; None on the others.

    Raises:
        UserError: on every rank: the file cannot be written.
        ValueError: a matrix that is to be orthogonalised is not what its spec declares.
    """
    whole = _gathered(_own(config, chunks, plans, mesh), mesh)
    path: Path = config.train.output / TABLE_NAME

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_tsv(in_model_order(whole.rows, chunks.spec)), encoding="utf-8")

    on_first_rank("the table of parameters cannot be written", write)
    if dist.get_rank() > 0:
        return None
    return "\n".join([*console_lines(whole), f"every parameter with its owner: {path}"])


def _own(config: PretrainConfig, chunks: ModelChunks, plans: Sequence[BufferPlan], mesh: Mesh) -> Holding:
    specs = {parameter.name: parameter for parameter in chunks.spec.parameters()}
    return holding(
        plans,
        {plan.replicas: mesh.replicas(plan.replicas).ranks_by_cell for plan in plans},
        torch.empty((), dtype=DTYPES[config.train.precision]).element_size(),
        [shard(specs[name], mesh.place) for name, tensor in chunks.logical_tensors() if not tensor.requires_grad],
        chunks.embedding_is_copy,
        biases_are_updated=not config.balance.freeze_router,
    )


def _gathered(own: Holding, mesh: Mesh) -> Holding:
    """On the first rank, what all ranks hold.

    Other parts of a stage's parameters are on its other expert- and tensor-parallel ranks, other stages' on other
    pipeline ranks; the rest of the ranks hold the same. The first rank is the first of its groups.
    """
    for group in (mesh.groups.ep, mesh.groups.tp, mesh.groups.pp):
        if group.size() > 1:
            received = [own for _ in range(group.size())] if group.rank() == 0 else None
            dist.gather_object(own, received, dst=dist.get_process_group_ranks(group)[0], group=group)
            own = own if received is None else merge(received)
    return own
