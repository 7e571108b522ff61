"""One rank of any layout, built on this machine: real process groups without processes, real modules without memory.

torch's fake process group plays the other ranks (it answers every collective at once and moves nothing), and the
meta device holds shapes only. What a rank would hold and with whom it would talk is then read off the objects that
training uses: ``build_mesh``, ``StepModel`` and ``ShardedModel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import model_spec
from steptron.model.stages import Stage
from steptron.optim.buffer_plan import BufferPlan
from steptron.planning.placement import Coordinates

if TYPE_CHECKING:
    import torch.distributed as dist

    from steptron.model.assembly import StepModel
    from steptron.model.chunks import ModelChunks
    from steptron.parallel.mesh import Mesh

GROUPS = ("tp", "cp", "dp", "dp_cp", "tp_dp_cp", "pp", "ep", "expt_dp")
"""The groups that are read off, by the names of Megatron-Core's ``ProcessGroupCollection``."""


@dataclass(frozen=True)
class BuiltBuffer:
    """A gradient buffer.

    Attributes:
        plan: its layout, and who owns what.
        ranks: those over which it is added up.
        parameters: names of the parameters that have their gradients in it.
        elements: fp32 numbers.
        spans: sizes of the parts that are reduced one by one.
        owned: numbers that this rank updates.
        within_node, between_nodes: the ranks with which this one adds up first and then, where ``parallel.node_size``
            factors the reduction; both empty where nothing is factored.
        filling: numbers that spans are filled up with while they are added up to all ranks by nodes.
    """

    plan: BufferPlan
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    elements: int
    spans: tuple[int, ...]
    owned: int
    within_node: tuple[int, ...]
    between_nodes: tuple[int, ...]
    filling: int


@dataclass(frozen=True)
class BuiltChunk:
    """A model chunk.

    Attributes:
        index: which of the pipeline x virtual_pipeline stages it is.
        stage: its layers, and whether it is the first and the last stage.
        shapes: local shape of every parameter, and of the router's selection biases (buffers), by logical name.
        frozen: names of the parameters that get no gradient.
        embedding_is_copy: whether it holds the embedding for MTP only.
    """

    index: int
    stage: Stage
    shapes: dict[str, tuple[int, ...]]
    frozen: frozenset[str]
    embedding_is_copy: bool


@dataclass(frozen=True)
class BuiltRank:
    """A rank as it was built; gradient buffers hold parameters of all its chunks."""

    rank: int
    coordinates: Coordinates
    groups: dict[str, tuple[int, ...]]
    chunks: tuple[BuiltChunk, ...]
    buffers: tuple[BuiltBuffer, ...]


def build_rank(config: PretrainConfig, world_size: int, rank: int) -> BuiltRank:
    """Builds what one of ``world_size`` processes would hold. Needs no other process, GPU or memory.

    Args:
        config: a configuration that ``steptron.config.checks`` accepts for this number of processes.
        world_size: processes of the run.
        rank: the one to build.

    Raises:
        ValueError: there is no such rank.
        RuntimeError: this process has a default process group already.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank}: the {world_size:,} ranks are numbered 0 to {world_size - 1}")
    import torch

    from steptron.platform import megatron_cpu

    if not torch.cuda.is_available():
        megatron_cpu.install()
    from steptron.parallel.mesh import build_mesh

    with _fake_processes(world_size, rank):
        mesh = build_mesh(config.parallel)
        own = Coordinates(
            mesh.pipeline_rank,
            mesh.tensor_rank,
            mesh.context_rank,
            mesh.data_rank,
            mesh.expert_rank,
            mesh.groups.expt_dp.rank(),
        )
        groups = {name: _ranks(getattr(mesh.groups, name)) for name in GROUPS}
        model = _chunks(config, mesh)
        # Before parameters move into flat tensors, of which shapes are views.
        chunks = tuple(_built_chunk(index, chunk, mesh) for index, chunk in enumerate(model))
        return BuiltRank(rank, own, groups, chunks, tuple(_buffers(model, config, mesh)))


def _chunks(config: PretrainConfig, mesh: Mesh) -> ModelChunks:
    import torch

    from steptron.model.chunks import build_chunks
    from steptron.model.transformer_config import DTYPES, transformer_config

    parallel = config.parallel
    if parallel.dispatcher == "flex":
        # Holds no parameters, and cannot be made where DeepEP is not installed.
        parallel = parallel.model_copy(update={"dispatcher": "alltoall"})
    engine = transformer_config(config.model, parallel, DTYPES[config.train.precision])
    with torch.device("meta"):
        return build_chunks(config, model_spec(config.model), engine, mesh)


def _built_chunk(index: int, module: StepModel, mesh: Mesh) -> BuiltChunk:
    return BuiltChunk(
        index=index * mesh.pipeline_size + mesh.pipeline_rank,
        stage=module.stage,
        shapes={name: tuple(tensor.shape) for name, tensor in module.logical_tensors()},
        frozen=frozenset(name for name, tensor in module.logical_tensors() if not tensor.requires_grad),
        embedding_is_copy=module.embedding_is_copy,
    )


def _buffers(chunks: ModelChunks, config: PretrainConfig, mesh: Mesh) -> Iterator[BuiltBuffer]:
    from steptron.optim.ownership import Reduction
    from steptron.parallel.sharded_model import ShardedModel, buffer_plans

    sharded = ShardedModel(chunks, buffer_plans(chunks, config.optimizer, mesh), mesh)
    for buffer in sharded.gradients:
        group = getattr(mesh.groups, buffer.plan.replicas)
        factored = mesh.by_node.get(buffer.plan.replicas)
        within: tuple[int, ...] = ()
        between: tuple[int, ...] = ()
        if factored is not None and factored.intra is not None and factored.inter is not None:
            within, between = _ranks(factored.intra), _ranks(factored.inter)
        spans = tuple(span.data.numel() for span in buffer.spans)
        fills = bool(within) and buffer.plan.layout.reduction is Reduction.ALL_REDUCE
        own = set(buffer.plan.pieces)
        yield BuiltBuffer(
            plan=buffer.plan,
            ranks=_ranks(group),
            parameters=tuple(
                name
                for name, parameter in chunks.named_parameters()
                if parameter.requires_grad and parameter.main_grad._base is buffer.data  # type: ignore[attr-defined]
            ),
            elements=buffer.data.numel(),
            spans=spans,
            owned=sum(piece.gradient.numel() for piece in sharded.owned if piece.piece in own),
            within_node=within,
            between_nodes=between,
            filling=sum(-size % len(within) for size in spans) if fills else 0,
        )


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


@contextmanager
def _fake_processes(world_size: int, rank: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a rank is built by a process of its own: a process group exists already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
