"""One rank of any layout, built on this machine: real process groups without processes, real modules without memory.

torch's fake process group plays the other ranks (it answers every collective at once and moves nothing), and the
meta device holds shapes only. What a rank would hold and with whom it would talk is then read off the objects that
training uses: ``build_mesh``, ``StepModel`` and ``DataParallel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import model_spec
from steptron.model.stages import Stage
from steptron.planning.placement import Coordinates

if TYPE_CHECKING:
    import torch.distributed as dist

    from steptron.parallel.gradient_buffer import DataParallel
    from steptron.parallel.mesh import Mesh

GROUPS = ("tp", "cp", "dp", "dp_cp", "tp_dp_cp", "pp", "ep", "expt_dp")
"""The groups that are read off, by the names of Megatron-Core's ``ProcessGroupCollection``."""


@dataclass(frozen=True)
class BuiltBuffer:
    """A gradient buffer.

    Attributes:
        ranks: those over which it is added up.
        parameters: names of the parameters that have their gradients in it.
        elements: fp32 numbers.
        buckets: parts that are reduced one by one.
        within_node, between_nodes: the ranks with which this one adds up first and then, where ``parallel.node_size``
            factors the reduction; both empty where nothing is factored.
        padding: numbers that the buckets are filled up with for it.
    """

    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    elements: int
    buckets: int
    within_node: tuple[int, ...]
    between_nodes: tuple[int, ...]
    padding: int


@dataclass(frozen=True)
class BuiltChunk:
    """A model chunk.

    Attributes:
        index: which of the pipeline x virtual_pipeline stages it is.
        stage: its layers, and whether it is the first and the last stage.
        shapes: local shape of every parameter, and of the router's selection biases (buffers), by logical name.
        frozen: names of the parameters that get no gradient.
        embedding_is_copy: whether it holds the embedding for MTP only.
        buffers: gradient buffers.
    """

    index: int
    stage: Stage
    shapes: dict[str, tuple[int, ...]]
    frozen: frozenset[str]
    embedding_is_copy: bool
    buffers: tuple[BuiltBuffer, ...]


@dataclass(frozen=True)
class BuiltRank:
    """A rank as it was built."""

    rank: int
    coordinates: Coordinates
    groups: dict[str, tuple[int, ...]]
    chunks: tuple[BuiltChunk, ...]


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
        return BuiltRank(rank, own, groups, tuple(_chunks(config, mesh)))


def _chunks(config: PretrainConfig, mesh: Mesh) -> Iterator[BuiltChunk]:
    import torch

    from steptron.model.chunks import build_chunks
    from steptron.model.transformer_config import DTYPES, transformer_config
    from steptron.parallel.gradient_buffer import DataParallel

    parallel = config.parallel
    if parallel.dispatcher == "flex":
        # Holds no parameters, and cannot be made where DeepEP is not installed.
        parallel = parallel.model_copy(update={"dispatcher": "alltoall"})
    engine = transformer_config(config.model, parallel, DTYPES[config.train.precision])
    with torch.device("meta"):
        chunks = build_chunks(config, model_spec(config.model), engine, mesh)
    for chunk, module in enumerate(chunks):
        yield BuiltChunk(
            index=chunk * mesh.pipeline_size + mesh.pipeline_rank,
            stage=module.stage,
            shapes={name: tuple(tensor.shape) for name, tensor in module.logical_tensors()},
            frozen=frozenset(name for name, tensor in module.logical_tensors() if not tensor.requires_grad),
            embedding_is_copy=module.embedding_is_copy,
            buffers=tuple(_buffers(DataParallel(module, mesh))),
        )


def _buffers(model: DataParallel) -> Iterator[BuiltBuffer]:
    from steptron.parallel.factored_group import FactoredGroup

    for buffer in model.buffers:
        names = tuple(
            name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and parameter.main_grad._base is buffer.data
        )
        buckets = buffer.bucket_sizes
        within: tuple[int, ...] = ()
        between: tuple[int, ...] = ()
        if isinstance(buffer.group, FactoredGroup):
            whole = buffer.group.whole
            if buffer.group.intra is not None and buffer.group.inter is not None:
                within, between = _ranks(buffer.group.intra), _ranks(buffer.group.inter)
        else:
            whole = buffer.group
        padding = sum(-elements % len(within) for elements in buckets) if within else 0
        yield BuiltBuffer(_ranks(whole), names, buffer.data.numel(), len(buckets), within, between, padding)


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
