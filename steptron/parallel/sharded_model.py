"""A rank's model chunks with their gradients reduced, owned and gathered: ZeRO-1 around Megatron's schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from steptron.config.schema import OptimizerConfig
from steptron.model.assembly import StepModel
from steptron.model.chunks import ModelChunks
from steptron.model.parameter_shards import ParameterShard, shard
from steptron.optim.buffer_plan import BufferPlan, plan_buffers
from steptron.optim.owned import OwnedPiece
from steptron.optim.ownership import Reduction
from steptron.parallel.gradient_buffer import GradientBuffer, GradientBuffers
from steptron.parallel.mesh import Mesh
from steptron.parallel.parameter_buffer import ParameterBuffer, ParameterGather
from steptron.parallel.replica_group import ReplicaGroup


class DataParallel(MegatronModule):
    """A model chunk behind the interface that Megatron's schedules drive; waits for parameters where it needs them."""

    def __init__(self, module: StepModel, gather: ParameterGather) -> None:
        super().__init__(module.config)
        self.module = module
        layers = list(module.layers.values())
        embedding = list(module.embedding.parameters()) if hasattr(module, "embedding") else []
        before_heads = {*embedding, *(parameter for layer in layers for parameter in layer.parameters())}
        heads = [parameter for parameter in module.parameters() if parameter not in before_heads]
        needed: list[tuple[torch.nn.Module, list[torch.nn.Parameter]]] = [(module, embedding)]
        needed += [(layer, list(layer.parameters())) for layer in layers]
        if module.stage.is_last:
            # Comes first of all that follows the layers; a head's weight is read without a call of the head.
            needed.append((module.final_norm, heads))
        for part, parameters in needed:
            part.register_forward_pre_hook(lambda *_, parameters=parameters: gather.wait(parameters))

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.module(*args, **kwargs)


class ShardedModel:
    """The chunks of a rank, and what this rank owns of their parameters.

    Args:
        chunks: the model; parameters may move in memory.
        plans: the gradient buffers, as :func:`buffer_plans` gives them.
        mesh: the process groups.

    Attributes:
        chunks: the model, each chunk as the schedules call it.
        plans: the gradient buffers.
        gradients: the buffers themselves.
        owned: what this rank updates.
        gather: brings parameters back from their owners.
    """

    def __init__(self, chunks: ModelChunks, plans: Sequence[BufferPlan], mesh: Mesh) -> None:
        self.plans = list(plans)
        self._groups: dict[str, ReplicaGroup] = {plan.replicas: mesh.replicas(plan.replicas) for plan in plans}
        parameters = dict(chunks.named_parameters())
        # Parameters first: while they move they exist twice, before there are gradients.
        self.gather = ParameterGather(
            [ParameterBuffer(plan, parameters, self._groups[plan.replicas]) for plan in plans]
        )
        self.gradients = GradientBuffers([GradientBuffer(plan, parameters) for plan in plans], self._groups)
        self.chunks = [DataParallel(chunk, self.gather) for chunk in chunks]
        self.owned = [
            piece
            for plan in plans
            for piece in owned_pieces(
                plan,
                parameters,
                self._groups[plan.replicas].cell,
                chunks.embedding_is_copy,
                lambda parameter: parameter.main_grad,  # type: ignore[attr-defined]
            )
        ]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes accumulate and do not reduce (all but the last micro-batch)."""
        self.gradients.sync_enabled = False
        try:
            yield
        finally:
            self.gradients.sync_enabled = True

    def finalize_gradients(
        self,
        model: list[DataParallel],
        num_tokens: torch.Tensor | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool = False,
    ) -> None:
        """Finishes data-parallel reductions and adds up the gradients of the replicated embedding.

        Called by Megatron-Core's schedules, whose signature it has. ``num_tokens`` is not used: losses
        were divided by global counts beforehand.

        The embedding exists twice when MTP runs on a last stage that is not the first: its gradient is
        the sum over both stages, which cut it alike.
        """
        self.gradients.finish()
        assert pg_collection is not None
        for buffer in self.gradients:
            if buffer.plan.is_shared_embedding:
                for part in self._reduced_parts(buffer):
                    dist.all_reduce(part, group=pg_collection.embd)

    def _reduced_parts(self, buffer: GradientBuffer) -> list[torch.Tensor]:
        """Slices of a buffer that hold sums on this rank."""
        if buffer.plan.layout.reduction is Reduction.ALL_REDUCE:
            return [buffer.data]
        group = self._groups[buffer.plan.replicas]
        return [span.data.chunk(group.size())[group.cell] for span in buffer.spans]


def buffer_plans(chunks: ModelChunks, config: OptimizerConfig, mesh: Mesh) -> list[BufferPlan]:
    """The gradient buffers of a rank."""
    return plan_buffers(
        trained_shards(chunks, mesh),
        config,
        mesh.tensor_size,
        {name: mesh.replicas(name).size() for name in ("expt_dp", "dp_cp", "tp_dp_cp")},
        embedding_is_shared=any(shares_embedding(chunk) for chunk in chunks),
    )


def trained_shards(chunks: ModelChunks, mesh: Mesh) -> list[ParameterShard]:
    """The rank's parts of the parameters that get gradients, in module order."""
    specs = {parameter.name: parameter for parameter in chunks.spec.parameters()}
    return [shard(specs[name], mesh.place) for name, tensor in chunks.named_parameters() if tensor.requires_grad]


def shares_embedding(chunk: StepModel) -> bool:
    """Whether this chunk has the embedding and a chunk of another pipeline stage has it too."""
    one_stage = chunk.stage.is_first and chunk.stage.is_last
    return chunk.mtp_depths > 0 and not one_stage and hasattr(chunk, "embedding")


def owned_pieces(
    plan: BufferPlan,
    parameters: Mapping[str, torch.nn.Parameter],
    cell: int,
    embedding_is_copy: bool,
    gradient_of: Callable[[torch.nn.Parameter], torch.Tensor],
) -> Iterator[OwnedPiece]:
    """What the owner of a cell of a buffer updates; ``gradient_of`` gives the gradient of a parameter, in its shape."""
    for piece in plan.pieces:
        if piece.owner == cell:
            parameter = parameters[piece.shard.parameter.name]
            part = slice(piece.start, piece.stop)
            yield OwnedPiece(
                piece,
                parameter.detach().view(-1)[part],
                gradient_of(parameter).view(-1)[part],
                is_copy=plan.is_shared_embedding and embedding_is_copy,
            )
