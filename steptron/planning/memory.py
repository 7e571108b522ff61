"""Memory of a rank in a training step, estimated from the specs before anything runs.

What does not change in a step (parameters, gradients, optimizer state, the batch) is counted exactly; activations
follow the operations of ``steptron.planning.activations`` along the order of the pipeline's schedule. Not counted: the
programs themselves, caches of allocators and fragments between their blocks, buffers of communication libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import ParameterRole, ParameterSpec
from steptron.optim.batches import Batch
from steptron.optim.buffer_plan import BufferPlan, Piece
from steptron.optim.rules import Algorithm
from steptron.planning.activations import ChunkMemory, Workload, chunk_memory, chunk_operations
from steptron.planning.ownership import idle_parameters, muon_batches, owned_pieces, rank_buffers
from steptron.planning.pipeline import passes_of
from steptron.planning.placement import HeldParameter, Placement
from steptron_kernels.extension import has_fast_bf16, why_unfit

_FP32, _BF16, _FP64 = 4, 2, 8
_BATCH_BYTES = 4 * 8 + 1
"""Of a token in a ``MicroBatch``: tokens, labels, positions and documents in int64, a loss mask in bool."""
_PANEL = 64
"""Columns that a packed weight is filled up to (``csrc/gemm.h``)."""
_ELEMENT = {"fp32": _FP32, "bf16": _BF16}
_ITERATION = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Of a number in the state of Polar Express, by ``optimizer.muon.precision``."""
_STATE = {Algorithm.MUON: 1, Algorithm.ADAMW: 2, Algorithm.SGD: 0}
"""fp32 numbers that an algorithm keeps for every number that it updates."""
_UNPACKED = frozenset(
    {
        ParameterRole.EMBEDDING,
        ParameterRole.NORM,
        ParameterRole.SINK,
        ParameterRole.ROUTER,
        ParameterRole.ROUTER_BIAS,
        ParameterRole.VALUE_HEAD,
    }
)


@dataclass(frozen=True)
class Assumptions:
    """What a configuration leaves open.

    Attributes:
        device: what the run will be on.
        native: whether the operations are the native ones (``train.kernels``), on CPUs in fp32.
        products_in_bf16: whether native matrix products round their operands (``train.products``).
        several_documents: whether rows hold several documents that do not see each other.
        imbalance: rows that reach the experts of the busiest rank over those at perfect balance; at least 1.
    """

    device: Literal["cpu", "cuda"]
    native: bool
    products_in_bf16: bool
    several_documents: bool
    imbalance: float = 1.0


def assume(config: PretrainConfig, device: Literal["cpu", "cuda"] | None = None, imbalance: float = 1.0) -> Assumptions:
    """What a run of the configuration is taken to be, where only the machine or the data decide.

    Args:
        config: the configuration.
        device: what the run will be on; when None ``train.device``, and for auto a GPU in bf16, a CPU in fp32.
        imbalance: see ``Assumptions``.
    """
    train = config.train
    if device is None:
        auto: Literal["cpu", "cuda"] = "cuda" if train.precision == "bf16" else "cpu"
        device = auto if train.device == "auto" else train.device
    can_be_native = device == "cpu" and train.precision == "fp32"
    native = can_be_native and (train.kernels == "native" or (train.kernels == "auto" and why_unfit() is None))
    in_bf16 = native and (train.products == "bf16" or (train.products == "auto" and has_fast_bf16()))
    return Assumptions(device, native, in_bf16, config.data.document_attention == "isolated", imbalance)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parameters: parameters, with what fills them up where they lie in the cells of their owners, and the router's
            selection biases.
        gradients: fp32 gradients of the parameters in training, padding included.
        optimizer: of what the rank owns, momentum or moments, and fp32 weights behind narrower parameters.
        packed_weights: copies of weights in the layout that native products read.
        batch: the micro-batches of a step.
        buffers: communication buffers that stay.
        activations: what is kept for backward passes at the moment of most, by part.
        in_flight: passes through chunks whose activations are kept then.
        transient: what is alive besides at that moment: gradients between operations, copies, messages.
        update: what the update needs besides what is fixed, when no activations are kept.
    """

    parameters: float
    gradients: float
    optimizer: float
    packed_weights: float
    batch: float
    buffers: float
    activations: dict[str, float] = field(default_factory=dict)
    in_flight: int = 0
    transient: float = 0
    update: float = 0

    @property
    def fixed(self) -> float:
        """What is there before a step and after it."""
        return self.parameters + self.gradients + self.optimizer + self.packed_weights + self.batch + self.buffers

    @property
    def peak(self) -> float:
        """The most in a step."""
        return self.fixed + max(sum(self.activations.values()) + self.transient, self.update)


def rank_memory(
    config: PretrainConfig,
    placement: Placement,
    rank: int,
    assumed: Assumptions,
    buffers: Sequence[BufferPlan] | None = None,
) -> RankMemory:
    """The memory of one rank.

    Args:
        config: a configuration that ``steptron.config.checks`` accepts for the number of processes.
        placement: its layout.
        rank: the rank.
        assumed: what the configuration leaves open.
        buffers: the gradient buffers of its pipeline rank, where they are known.

    Raises:
        ValueError: there is no such rank.
    """
    train = config.train
    own, held = placement.coordinates(rank), placement.held(rank)
    buffers = rank_buffers(config, placement, rank) if buffers is None else buffers
    owned = owned_pieces(config, placement, rank, buffers)
    element = _ELEMENT[train.precision]
    micro_batches = train.micro_batches(placement.data)
    work = workload(config, placement, own.context, assumed)
    fixed = RankMemory(
        parameters=sum(
            part.shard.size * (_FP32 if part.shard.parameter.role is ParameterRole.ROUTER_BIAS else element)
            for part in held
        )
        + element * sum(buffer.layout.padding for buffer in buffers if _holds_parameters(buffer)),
        gradients=_FP32 * sum(buffer.layout.length for buffer in buffers),
        optimizer=optimizer_state(owned, config),
        packed_weights=_packed_weights(held, placement, assumed) if assumed.native else 0,
        batch=micro_batches * train.micro_batch_size * config.data.sequence_length * _BATCH_BYTES,
        buffers=_buffers(work, placement.spec.hidden_size),
        update=update_memory(owned, config, assumed),
    )
    return _at_peak(fixed, placement, own.pipeline, work, micro_batches)


def workload(config: PretrainConfig, placement: Placement, context_rank: int, assumed: Assumptions) -> Workload:
    """A micro-batch of the configuration on a rank."""
    balance, parallel = config.balance, config.parallel
    return Workload(
        sequences=config.train.micro_batch_size,
        length=config.data.sequence_length,
        tensor=placement.tensor,
        context=placement.context,
        expert=placement.expert,
        context_rank=context_rank,
        element=_ELEMENT[config.train.precision],
        native=assumed.native,
        device=assumed.device,
        dispatcher=parallel.dispatcher,
        several_documents=assumed.several_documents,
        balance_loss=balance.ep_loss_coefficient > 0 and (balance.ep_groups or parallel.expert) > 1,
        imbalance=assumed.imbalance,
    )


def optimizer_state(owned: Sequence[Piece], config: PretrainConfig) -> int:
    """Bytes that stay for what a rank owns: momentum or moments, and fp32 weights behind narrower parameters."""
    masters = 0 if config.train.precision == "fp32" else 1
    return _FP32 * sum((piece.stop - piece.start) * (_STATE[piece.rule.algorithm] + masters) for piece in owned)


def update_memory(owned: Sequence[Piece], config: PretrainConfig, assumed: Assumptions) -> float:
    """Most bytes that a rank's update has besides what stays: Muon's largest batch. AdamW and SGD work in place."""
    kernels = config.train.kernels
    native = assumed.device == "cpu" and (kernels == "native" or (kernels == "auto" and why_unfit() is None))
    return max(
        (
            _batch_memory(batch, config, assumed.device, native)
            for batch in muon_batches(owned, config.optimizer, config.train.deterministic)
        ),
        default=0.0,
    )


def _holds_parameters(buffer: BufferPlan) -> bool:
    """Whether its parameters lie in a flat tensor of their own, in cells like their gradients."""
    return buffer.layout.has_cells and buffer.layout.ranks > 1


def _batch_memory(batch: Batch, config: PretrainConfig, device: str, native: bool) -> float:
    """Of a batch of matrices [l, k]: collected, gathered, made orthogonal."""
    own = len(batch.indices) * batch.short * batch.long * _FP32 / batch.parts
    whole = batch.size * batch.short * batch.long * _FP32
    # Each direction alone, and all of them stacked; without Nesterov they are views of the momentum.
    stacked = own * (2 if config.optimizer.muon.nesterov else 1)
    gathered = stacked + 2 * whole if batch.parts > 1 else 0.0
    filled = own * batch.parts + whole if batch.size > len(batch.indices) else 0.0
    orthogonal = 2.0 * whole  # input and result
    if not native:
        orthogonal = max(orthogonal, whole + _iteration_memory(batch, config, device))
    return max(stacked, gathered, filled, orthogonal)


def _iteration_memory(batch: Batch, config: PretrainConfig, device: str) -> float:
    """Besides the input, in torch operations (``steptron_kernels.polar_express.plain``)."""
    x, gram = batch.size * batch.short * batch.long, batch.size * batch.short**2
    narrow = _ITERATION[config.optimizer.muon.precision]
    # On CPUs numbers of a narrow dtype are kept as rounded fp32.
    stored = _FP32 if device == "cpu" else narrow
    rounding = narrow + _FP32 if stored != narrow else 0
    norm = x * (_FP32 + _FP64)  # scaled, and once more in float64
    step = x * (2 * stored + rounding) + 2 * gram * stored
    return max(norm, step)


def packed_weights_padding(held: Sequence[HeldParameter], placement: Placement, assumed: Assumptions) -> int:
    """Bytes that packed weights are filled up with, of a rank's parts; 0 where there are none."""
    if not assumed.native:
        return 0
    return _packed_weights(held, placement, assumed) - _packed_weights(held, placement, assumed, panel=1)


def _packed_weights(
    held: Sequence[HeldParameter], placement: Placement, assumed: Assumptions, panel: int = _PANEL
) -> int:
    """Bytes of ``steptron_kernels.packed_weights``: as right operand of x W^T, in bf16 of dy W too."""
    idle = idle_parameters(placement)
    total = 0
    for part in held:
        parameter = part.shard.parameter
        if parameter.role in _UNPACKED or part.name in idle or not _is_native_product(parameter, placement):
            continue
        *stack, rows, columns = part.shard.shape
        count = stack[0] if stack else 1
        if assumed.products_in_bf16:
            pair = 2 if panel > 1 else 1
            elements = _filled(rows, panel) * _filled(columns, pair) + _filled(columns, panel) * _filled(rows, pair)
            total += count * _BF16 * elements
        else:
            total += count * _FP32 * _filled(rows, panel) * columns
    return total


def _is_native_product(parameter: ParameterSpec, placement: Placement) -> bool:
    """Megatron-Core multiplies where tensor parallelism cuts the matrix."""
    return placement.tensor == 1 or parameter.is_expert or parameter.role is ParameterRole.MTP_PROJECTION


def _filled(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _buffers(work: Workload, hidden_size: int) -> float:
    """Megatron-Core's buffer of gathered inputs, which stays for the next layer."""
    if work.tensor == 1 and not (work.dispatcher == "allgather" and work.expert > 1):
        return 0.0
    tokens = work.tokens if work.tensor > 1 else 0
    if work.dispatcher == "allgather" and work.expert > 1:
        tokens = max(tokens, work.own * work.tensor * work.expert)
    return tokens * hidden_size * work.element


def _at_peak(
    fixed: RankMemory, placement: Placement, pipeline_rank: int, work: Workload, micro_batches: int
) -> RankMemory:
    """Follows the schedule to the moment of most memory."""
    stages = placement.chunks(pipeline_rank)
    chunks = [
        chunk_memory(chunk_operations(placement.spec, stage, placement.mtp_depths, work, placement.pipeline > 1))
        for stage in stages
    ]
    hidden = work.own * placement.spec.hidden_size * work.element
    # With several chunks the next input and the next gradient have come in before they are needed.
    messages = 0.0 if placement.pipeline == 1 else hidden * (1 if len(chunks) == 1 else 2)
    alive: list[int] = []
    kept = peak = 0.0
    at_peak: tuple[list[int], float] = ([], 0.0)
    for step in passes_of(pipeline_rank, placement.pipeline, len(chunks), micro_batches):
        chunk = chunks[step.chunk]
        if not step.is_forward:
            alive.remove(step.chunk)
            kept -= chunk.total_kept
        most = kept + (chunk.forward_peak if step.is_forward else chunk.backward_peak)
        if most > peak:
            peak, at_peak = most, ([*alive, step.chunk], most)
        if step.is_forward:
            alive.append(step.chunk)
            kept += chunk.total_kept
    activations = _sum_parts([chunks[index] for index in at_peak[0]])
    transient = peak - sum(activations.values()) + messages
    return replace(fixed, activations=activations, in_flight=len(at_peak[0]), transient=transient)


def _sum_parts(chunks: list[ChunkMemory]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for chunk in chunks:
        for part, size in chunk.kept.items():
            parts[part] = parts.get(part, 0.0) + size
    return parts
