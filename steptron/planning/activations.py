"""What the operations of a model chunk take memory for: kept for the backward pass, and while they run.

A chunk is a list of operations in the order of its forward pass. Each says what it keeps for its backward, and what
else is alive while its forward or its backward runs. From the list follow what a micro-batch keeps and the most that
is alive in either pass. Every formula is that of the code it names: the autograd functions of ``steptron_kernels`` and
Megatron-Core's dispatchers and tensor-parallel layers. All sizes are bytes, for one micro-batch on one rank.

Not counted: what threads of native operations and communication libraries take for themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from steptron.model.layer_spec import AttentionSpec, DenseFfnSpec, LayerSpec, ModelSpec, MoeFfnSpec, MtpSpec
from steptron.model.parameter_shards import vocabulary_rows
from steptron.model.stages import Stage

_WIDE, _INDEX = 4, 8
"""Bytes of fp32 and of int64."""
_FILL = 16
"""Rows to a multiple of which native experts fill up each expert's share (``experts/native.cpp``)."""
_CHUNK_SCORES = 1 << 19
"""Scores that plain attention holds at once (``attention/plain.py``)."""
_CHUNK_LOGITS = 1 << 22
_FEWEST_ROWS = {"cpu": 128, "cuda": 1024}
"""Logits that the plain cross entropy holds at once, but so many rows at least (``linear_cross_entropy/plain.py``)."""


@dataclass(frozen=True)
class Workload:
    """A micro-batch as one rank meets it, and how it is computed.

    Attributes:
        sequences: B, of the micro-batch.
        length: S, tokens of a whole sequence.
        tensor, context, expert: numbers of ranks.
        context_rank: which share of the sequences the rank has; the first sees most keys.
        element: bytes of a parameter and of an activation, 4 or 2.
        native: the operations are those in C++ (fp32 on a CPU); otherwise torch's.
        device: where they run; on "cuda" attention without document borders is torch's fused one.
        dispatcher: as ``parallel.dispatcher``.
        several_documents: rows hold several documents that do not see each other.
        balance_loss: the balance loss takes part in training.
        imbalance: rows that reach this rank's experts over those at perfect balance.
    """

    sequences: int
    length: int
    tensor: int = 1
    context: int = 1
    expert: int = 1
    context_rank: int = 0
    element: int = 4
    native: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    dispatcher: str = "alltoall"
    several_documents: bool = True
    balance_loss: bool = True
    imbalance: float = 1.0

    @property
    def shard(self) -> int:
        """Tokens of one sequence on this rank."""
        return self.length // self.context

    @property
    def tokens(self) -> int:
        """T: tokens of the context-parallel rank, which its tensor-parallel ranks share."""
        return self.sequences * self.shard

    @property
    def own(self) -> int:
        """U: tokens whose hidden states the rank holds between blocks (sequence parallelism)."""
        return self.tokens // self.tensor

    @property
    def narrow(self) -> bool:
        """Whether activations are of 16 bits."""
        return self.element < _WIDE


@dataclass(frozen=True)
class Operation:
    """Memory of one operation, in bytes.

    Attributes:
        part: what it belongs to.
        kept: kept for the backward from its forward on; each tensor counts once, with the operation that reads it.
        forward: alive besides while the forward runs: results that are not kept, copies.
        backward: alive besides while the backward runs: gradients that come in, go out or wait, copies.
    """

    part: str
    kept: float = 0
    forward: float = 0
    backward: float = 0


@dataclass(frozen=True)
class ChunkMemory:
    """Memory of a micro-batch in a chunk, in bytes.

    Attributes:
        kept: from the end of its forward pass to its backward pass, by part.
        forward_peak: the most while the forward runs, what is kept included.
        backward_peak: the most while the backward runs, likewise.
    """

    kept: dict[str, float]
    forward_peak: float
    backward_peak: float

    @property
    def total_kept(self) -> float:
        return sum(self.kept.values())


def chunk_memory(operations: Iterable[Operation]) -> ChunkMemory:
    """Runs through the operations forward and back."""
    listed = list(operations)
    forward = backward = alive = 0.0
    kept: dict[str, float] = {}
    for operation in listed:
        alive += operation.kept
        kept[operation.part] = kept.get(operation.part, 0.0) + operation.kept
        forward = max(forward, alive + operation.forward)
    for operation in reversed(listed):
        backward = max(backward, alive + operation.backward)
        alive -= operation.kept
    return ChunkMemory(kept, forward, backward)


def chunk_operations(spec: ModelSpec, stage: Stage, mtp_depths: int, work: Workload, is_sent: bool) -> list[Operation]:
    """The operations of a model chunk.

    Args:
        spec: the whole model.
        stage: the chunk's part of it.
        mtp_depths: MTP depths that run.
        work: the micro-batch.
        is_sent: the chunk's result goes to another pipeline stage, and is kept until its gradient comes back.
    """
    hidden = work.own * spec.hidden_size * work.element
    operations = []
    if stage.is_first:
        operations.append(_embedding(spec, work, is_of_batch=work.context == 1))
    kinds = dict.fromkeys(spec.layers[index].attention.rope for index in stage.layers)
    if stage.is_last:
        kinds |= dict.fromkeys(depth.layer.attention.rope for depth in spec.mtp[:mtp_depths])
    # Cosines and sines are computed once for all layers of a kind.
    operations += [Operation("positions", work.tokens * rope.rotary_dim * work.element) for rope in kinds]
    for index in stage.layers:
        operations += layer_operations(spec.layers[index], work)
    if stage.is_last:
        operations += _heads(spec, mtp_depths, work)
    elif is_sent:
        # An empty stage hands its input on: input and output are one tensor.
        operations.append(Operation("messages", hidden, backward=hidden))
    return operations


def layer_operations(layer: LayerSpec, work: Workload) -> list[Operation]:
    """The operations of one layer, some of them recomputed as its spec says."""
    hidden = work.own * layer.hidden_size * work.element
    attention = _attention(layer, work)
    ffn = _moe(layer, layer.ffn, work) if isinstance(layer.ffn, MoeFfnSpec) else _dense(layer, layer.ffn, work)
    # The norm's input is the residual stream, kept as input of the recomputed part too.
    if "attention" in layer.recompute:
        attention = [_recomputed("attention", attention, hidden)]
    if "ffn" in layer.recompute:
        ffn = [_recomputed("feed-forward", ffn, hidden)]
    return attention + ffn


# ------------------------------------------------------------------------------------------ parts


def _norm(part: str, tokens: float, width: int, work: Workload, waiting: float, is_kept: bool = True) -> Operation:
    """An RMSNorm with its input (``rms_norm``, ``add_rms_norm``); ``waiting``: gradients that wait meanwhile."""
    size = tokens * width
    copies = 2 * _WIDE * size if work.narrow else 0
    return Operation(
        part,
        kept=tokens * _WIDE + (size * work.element if is_kept else 0),
        forward=copies + size * work.element,
        backward=waiting + 2 * size * work.element + (3 * _WIDE * size if work.narrow else 0),
    )


def _attention(layer: LayerSpec, work: Workload) -> list[Operation]:
    spec, e, T, U = layer.attention, work.element, work.tokens, work.own
    heads, groups = spec.num_heads // work.tensor, spec.num_kv_groups // work.tensor
    hidden, full_hidden = U * layer.hidden_size * e, T * layer.hidden_size * e
    query, keys = T * heads * spec.head_dim * e, 2 * T * groups * spec.head_dim * e
    gates = T * heads if spec.gate else 0
    projected = query + keys + gates * e
    projection = (heads + 2 * groups) * spec.head_dim + (heads if spec.gate else 0)
    gathers = full_hidden if work.tensor > 1 else 0
    norm_is_kept = "norm" not in layer.recompute
    operations = [
        _norm("norms", U, layer.hidden_size, work, waiting=hidden),
        Operation(
            "attention",
            kept=hidden if norm_is_kept else 0,
            forward=projected,
            backward=hidden
            + projected
            + hidden
            + gathers
            + projection * layer.hidden_size * e
            + (0 if norm_is_kept else hidden),
        ),
        Operation(
            "attention",
            kept=projected + T * (heads + groups) * _WIDE,
            forward=query + keys / 2 + (_WIDE + e) * T * heads * spec.head_dim * work.narrow,
            backward=hidden + 2 * projected + (0 if work.native else query),
        ),
        _core_attention(spec, heads, groups, work, waiting=hidden),
    ]
    if spec.gate:
        # With several ranges of a shard their outputs are joined to a new tensor, which the gate keeps.
        joined = query if work.context > 1 else 0
        wide = 0 if work.native else query // e * _WIDE
        operations.append(
            Operation(
                "attention",
                kept=joined + (0 if work.native else gates * _WIDE),
                forward=query + (wide if work.narrow else 0),
                backward=hidden + 2 * query + gates * e + (wide if work.narrow or not work.native else 0),
            )
        )
    operations.append(
        Operation(
            "attention",
            kept=query if spec.gate or work.context > 1 else 0,  # else the output that the attention keeps itself
            forward=hidden + gathers,
            backward=hidden + gathers + query + layer.hidden_size * heads * spec.head_dim * e,
        )
    )
    return operations


def _core_attention(spec: AttentionSpec, heads: int, groups: int, work: Workload, waiting: float) -> Operation:
    e, T, D = work.element, work.tokens, spec.head_dim
    query = T * heads * D * e
    seen = work.sequences * _seen_rows(spec.window, work)
    key_rows = seen * 2 * groups * D
    ranges = 1 if work.context == 1 else 2
    kept = 2 * query + (T * groups * D * e if work.context == 1 else key_rows * e)  # values are views of the projection
    gradients = 2 * query + 2 * key_rows * e  # of output and queries, of keys and values
    if work.context > 1:
        gradients += T * 2 * groups * D * (_WIDE + e)  # the sum of the ranks' shares, before and after rounding
        gradients += key_rows * _WIDE if work.narrow else 0  # shares are added up in float32, and sent rounded
    if work.native:
        return Operation("attention", kept + 2 * T * heads * _WIDE, forward=query, backward=waiting + gradients)
    fused = work.device == "cuda" and spec.window is None and not work.several_documents and work.context == 1
    if fused and not spec.sink:
        return Operation("attention", kept + T * heads * _WIDE, forward=query, backward=waiting + gradients)
    chunk = _score_chunk(spec, heads, groups, work)
    rows = key_rows / ranges * _WIDE
    return Operation(
        "attention",
        kept + (T * heads * _WIDE if spec.sink else 0),
        forward=query + rows + 3 * chunk,
        backward=waiting + gradients + T * heads * _WIDE + 2 * rows + 3 * chunk,
    )


def _seen_rows(window: int | None, work: Workload) -> int:
    """Rows of keys of one sequence that a rank's queries see."""
    if work.context == 1:
        return work.length
    chunk = work.length // (2 * work.context)
    places = (work.context_rank, 2 * work.context - 1 - work.context_rank)
    early, late = ((0 if window is None else max(0, i * chunk - window + 1), (i + 1) * chunk) for i in places)
    together = max(early[1], late[1]) - min(early[0], late[0])
    return min(together, early[1] - early[0] + late[1] - late[0])


def _score_chunk(spec: AttentionSpec, heads: int, groups: int, work: Workload) -> float:
    """Bytes of the scores that plain attention holds at once."""
    queries = work.shard if work.context == 1 else work.length // (2 * work.context)
    keys = work.length if work.context == 1 else _seen_rows(spec.window, work)
    if spec.window is None or spec.window >= keys:
        tokens = min(128, max(32, _CHUNK_SCORES // max(1, work.sequences * heads * keys) // 16 * 16))
        return work.sequences * heads * min(tokens, queries) * keys * _WIDE
    block = min(64, max(16, 1 << max(0, (spec.window // 4).bit_length() - 1)))
    blocks = -(-queries // block)
    keys = (-(-(spec.window - 1) // block) + 1) * block
    rows = work.sequences * heads * block
    chunks = -(-blocks // max(1, _CHUNK_SCORES // (rows * keys)))
    return -(-blocks // chunks) * rows * keys * _WIDE


def _dense(layer: LayerSpec, spec: DenseFfnSpec, work: Workload) -> list[Operation]:
    hidden = work.own * layer.hidden_size * work.element
    norm_is_kept = "norm" not in layer.recompute
    return [
        _norm("norms", work.own, layer.hidden_size, work, waiting=hidden),
        Operation("feed-forward", hidden if norm_is_kept else 0),
        *_glu(layer, spec, work, "feed-forward", waiting=hidden + (0 if norm_is_kept else hidden)),
    ]


def _glu(layer: LayerSpec, spec: DenseFfnSpec, work: Workload, part: str, waiting: float) -> list[Operation]:
    """A dense feed-forward whose input is kept by others."""
    e, T, U, H = work.element, work.tokens, work.own, layer.hidden_size
    width = spec.hidden_size // work.tensor
    product, hidden = T * width * e, U * H * e
    gathers = T * H * e if work.tensor > 1 else 0
    product_is_kept = "activation" not in layer.recompute
    again = 0 if product_is_kept else product
    return [
        Operation(part, 0, 2 * product, waiting + 2 * product + hidden + gathers + 2 * width * H * e),
        Operation(
            part,
            2 * product + (_factors(spec.clamp, work) * product if product_is_kept else 0),
            product + (0 if work.native else product),
            waiting + 3 * product + (0 if work.native else 2 * product) + again,
        ),
        Operation(
            part,
            product if product_is_kept else 0,
            hidden + gathers,
            waiting + gathers + product + width * H * e + again + (_factors(spec.clamp, work) * again),
        ),
    ]


def _factors(clamp: float | None, work: Workload) -> int:
    """Tensors of the size of the product that torch's SwiGLU keeps: SiLU(gate), and both factors where clamped."""
    if work.native:
        return 0
    return 1 if clamp is None else 3


def _moe(layer: LayerSpec, spec: MoeFfnSpec, work: Workload) -> list[Operation]:
    e, U, H = work.element, work.own, layer.hidden_size
    hidden = U * H * e
    norm_is_kept = "norm" not in layer.recompute
    waiting = hidden + (0 if norm_is_kept else hidden)  # the residual's gradient
    wide_hidden = U * H * _WIDE if work.narrow else 0
    scores = U * spec.num_experts * _WIDE
    return [
        _norm("norms", U, H, work, waiting=hidden),
        Operation("feed-forward", hidden if norm_is_kept else 0),
        Operation(
            "router",
            kept=scores
            + U * spec.top_k * (_INDEX + _WIDE)
            + wide_hidden
            + (spec.num_experts * H * _WIDE if work.narrow else 0)
            + (0 if work.native else U * (2 * spec.top_k + 2) * _WIDE + U * spec.top_k * _INDEX)
            + (U * _WIDE if work.balance_loss else 0),
            forward=scores + U * spec.top_k * _WIDE,
            backward=waiting
            + 2 * hidden
            + wide_hidden
            + 2 * scores
            + spec.num_experts * H * (_WIDE if work.narrow else e),
        ),
        *_experts(layer, spec, work, waiting + hidden),
        *_glu(layer, spec.shared, work, "shared experts", waiting),
    ]


def _experts(layer: LayerSpec, spec: MoeFfnSpec, work: Workload, waiting: float) -> list[Operation]:
    """Dispatch, experts and combination; ``waiting``: gradients of the residual and of the shared expert's input."""
    e, U, H, F = work.element, work.own, layer.hidden_size, spec.expert_hidden_size
    experts = spec.num_experts // work.expert
    sent = U * spec.top_k
    rows = sent * (work.imbalance if work.expert > 1 else 1.0)
    weights = experts * F * H * e  # of the down projection; gate and up are twice as large
    hidden = U * H * e
    rows_are_kept = "moe_permutation" not in layer.recompute
    product_is_kept = "activation" not in layer.recompute
    operations = []
    if work.expert > 1:
        scores = U * spec.num_experts * _WIDE
        sizes = [sent * H * e, rows * H * e]  # before and after travelling
        if work.dispatcher == "allgather":
            sizes = [work.expert * work.tensor * hidden, rows * H * e]
        operations.append(
            Operation(
                "dispatch",
                kept=scores + U * spec.num_experts + sent * _INDEX + rows * _WIDE if rows_are_kept else 0,
                forward=sum(sizes) + scores,
                backward=waiting + sum(sizes) + max(sizes) + hidden,
            )
        )
    if work.native:
        filled = rows + experts * (_FILL - 1) / 2
        travelled = rows * H * e if work.expert > 1 else 0
        kept = filled * 2 * F * e + (2 * rows * _INDEX if work.expert == 1 else travelled * rows_are_kept)
        # With one rank the experts gather the rows themselves, and keep none.
        again = 0 if rows_are_kept else travelled
        backward = filled * (3 * F + 2 * H) * e + 3 * weights + rows * _WIDE + again
        result = travelled if work.expert > 1 else hidden
        operations.append(Operation("experts", kept, filled * H * e + result, waiting + backward + result + travelled))
    else:
        operations += _plain_experts(spec, work, rows, H, weights, waiting, rows_are_kept, product_is_kept)
    if work.expert > 1:
        sizes = [sent * H * e, rows * H * e]
        if work.dispatcher == "allgather":
            sizes = [work.expert * work.tensor * hidden, rows * H * e]
        operations.append(Operation("dispatch", 0, sum(sizes) + max(sizes) + hidden, waiting + sum(sizes) + max(sizes)))
    return operations


def _plain_experts(
    spec: MoeFfnSpec,
    work: Workload,
    rows: float,
    H: int,
    weights: float,
    waiting: float,
    rows_are_kept: bool,
    product_is_kept: bool,
) -> list[Operation]:
    e, F = work.element, spec.expert_hidden_size
    row, product = rows * H * e, rows * F * e
    # On CPUs bf16 operands of grouped products are copied to fp32, results back.
    copied = 2 if work.narrow and work.device == "cpu" else 0
    factors = _factors(spec.expert_clamp, work)
    indices = 3 * rows * _INDEX if work.expert == 1 else 0
    weighted = rows * F * _WIDE if work.narrow else product
    return [
        Operation(
            "experts",
            kept=(row if rows_are_kept else 0) + indices + rows * _WIDE,
            forward=2 * product + copied * (row + 2 * weights + 2 * product),
            backward=waiting
            + (0 if rows_are_kept else row)
            + 2 * product
            + row
            + 2 * weights
            + copied * max(2 * product + 2 * weights + row, row + 2 * product + 2 * weights),
        ),
        Operation(
            "experts",
            kept=2 * product + (factors * product if product_is_kept else 0),
            forward=product,
            backward=waiting + 5 * product + (0 if product_is_kept else 2 * product),
        ),
        Operation(
            "experts",
            kept=product if product_is_kept else 0,  # SiLU(gate) x up, before the routing weights
            forward=weighted,
            backward=waiting + product + 2 * weighted,
        ),
        Operation(
            "experts",
            kept=product if product_is_kept else 0,
            forward=row + copied * (product + weights + row),
            backward=waiting
            + row
            + product
            + weights
            + (0 if product_is_kept else (factors + 2) * product)
            + copied * (row + product + weights),
        ),
        Operation("experts", 0, row + work.own * H * e, waiting + row),
    ]


def _embedding(spec: ModelSpec, work: Workload, is_of_batch: bool) -> Operation:
    """The embedding of tokens, which are kept unless they are the batch's own; its result is kept by the norm that
    reads it."""
    hidden, full = (tokens * spec.hidden_size * work.element for tokens in (work.own, work.tokens))
    rows = vocabulary_rows(spec.vocab_size, work.tensor)
    return Operation(
        "embedding",
        kept=work.tokens * (_INDEX + 1 if work.tensor > 1 else 0 if is_of_batch else _INDEX),
        forward=hidden + (2 * full if work.tensor > 1 else full if work.sequences > 1 else 0),
        backward=(full if work.tensor > 1 else 0) + hidden + rows * spec.hidden_size * work.element,
    )


def _heads(spec: ModelSpec, mtp_depths: int, work: Workload) -> list[Operation]:
    """Final norm, MTP depths, then every loss, as ``StepModel.forward`` has them."""
    hidden = work.own * spec.hidden_size * work.element
    operations = [_norm("norms", work.own, spec.hidden_size, work, waiting=hidden * (mtp_depths > 0))]
    for index, depth in enumerate(spec.mtp[:mtp_depths]):
        operations += _mtp(spec, depth, work, is_first=index == 0)
    outputs = 1 + mtp_depths
    loss = _loss(spec, work)
    return operations + [
        # States that wait for their losses; gradients of those whose losses come later, which wait for their norms.
        replace(
            loss,
            forward=loss.forward + (outputs - index) * hidden,
            backward=loss.backward + (outputs - 1 - index) * hidden,
        )
        for index in range(outputs)
    ]


def _mtp(spec: ModelSpec, depth: MtpSpec, work: Workload, is_first: bool) -> list[Operation]:
    hidden = work.own * spec.hidden_size * work.element
    matrix = 2 * spec.hidden_size**2 * work.element
    # The hidden state that comes in is also the final norm's input, or that of the depth before: kept there.
    chained_is_new = is_first and not depth.pre_norm_chain
    return [
        _embedding(spec, work, is_of_batch=False),
        _norm("MTP", work.own, spec.hidden_size, work, waiting=2 * hidden),
        _norm("MTP", work.own, spec.hidden_size, work, waiting=2 * hidden, is_kept=chained_is_new),
        Operation("MTP", 2 * hidden, hidden, hidden + 2 * hidden + matrix + 2 * hidden),
        *layer_operations(depth.layer, work),
        _norm("norms", work.own, spec.hidden_size, work, waiting=hidden),
    ]


def _loss(spec: ModelSpec, work: Workload) -> Operation:
    """``linear_cross_entropy``: gradients are made in the forward and kept."""
    e, H, rows = work.element, spec.hidden_size, vocabulary_rows(spec.vocab_size, work.tensor)
    matrix, hidden = rows * H, work.tokens * H
    gathers = hidden * e if work.tensor > 1 else 0
    kept = hidden * e + matrix * _WIDE
    if work.native and work.tensor == 1:
        return Operation("loss", kept, 0, hidden * e)
    chunk = min(work.tokens, max(_CHUNK_LOGITS // rows, _FEWEST_ROWS[work.device])) * rows
    copies = chunk * e + matrix * e if work.narrow else 0
    scaled = matrix * _WIDE + (matrix * e if work.narrow else 0)
    return Operation("loss", kept, 2 * chunk * _WIDE + copies + gathers, scaled + hidden * e + gathers)


# --------------------------------------------------------------------------------- recomputation


def _recomputed(part: str, operations: Sequence[Operation], kept: float) -> Operation:
    """Operations of whose first run nothing but the input is kept."""
    memory = chunk_memory(operations)
    # Without keeping, the first run holds what one operation hands to the next.
    first_run = max(operation.kept + operation.forward for operation in operations)
    return Operation(part, kept, first_run, max(memory.forward_peak + kept, memory.backward_peak) - kept)
