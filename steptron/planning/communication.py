"""Communication of a training step, by formula: bytes per rank, process group and kind, before anything runs.

Follows what the modules, Megatron-Core's layers and dispatchers, our gradient and parameter buffers and Muon do in
``TrainStep.run``; ``benchmarks/layouts.py`` holds it against bytes counted in the collectives. Not included:
what happens between steps (checkpoints, validation, clocks), what a step does only when it fails, and what Muon's
diagnostics gather in the steps that they are due in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import AttentionSpec, LayerSpec, MoeFfnSpec
from steptron.model.stages import Stage
from steptron.optim.buffer_plan import BufferPlan
from steptron.optim.ownership import Reduction
from steptron.parallel.factors import Factor, split_by_node
from steptron.parallel.traffic import CommunicationVolume, Kind, Traffic, wire_bytes
from steptron.planning.ownership import muon_batches, owned_pieces, rank_buffers
from steptron.planning.placement import Placement

_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
_FP32 = 4
_INT64 = _FP64 = 8
_BOOL = 1


class Message(NamedTuple):
    """One operation: its group, kind and payload (bytes)."""

    group: str
    kind: Kind
    payload: int


Messages = tuple[Message, ...]


@dataclass(frozen=True)
class _Exchange:
    """What a part of the model exchanges in one micro-batch.

    Attributes:
        forward: in the forward pass, but the last of a block.
        last: the last of a block's forward pass: nothing is kept after it, so that running the block again in
            the backward pass stops before.
        backward: in the backward pass.
    """

    forward: Messages = ()
    last: Messages = ()
    backward: Messages = ()

    def __add__(self, other: _Exchange) -> _Exchange:
        return _Exchange(self.forward + self.last + other.forward, other.last, self.backward + other.backward)

    def run_again(self) -> Messages:
        """All of a micro-batch, with the forward pass repeated in the backward."""
        return self.all() + self.forward

    def all(self) -> Messages:
        return self.forward + self.last + self.backward


def step_communication(
    config: PretrainConfig,
    placement: Placement,
    rank: int,
    micro_batches: int | None = None,
    buffers: Sequence[BufferPlan] | None = None,
) -> CommunicationVolume:
    """What a rank hands to collectives in one optimizer step.

    Payloads and calls are exact, with two reservations. With the all-to-all dispatcher a rank sends as many token
    copies back as routing brought it: taken is the mean over the expert-parallel ranks, which is exact for their
    sum, and bytes on the wire are those of uniform routing. Of the flex dispatcher (DeepEP, whose operations are
    not torch's), hidden states are counted, once for each rank that holds one of a token's experts as uniform
    routing chooses them. The exchange of the vocabulary-parallel loss counts as one call, however it is cut.

    Args:
        config: a configuration that ``steptron.config.checks`` accepts for the number of processes.
        placement: its layout.
        rank: the rank.
        micro_batches: of the rank in the step; by ``train.global_batch_size`` when None.
        buffers: the gradient buffers of its pipeline rank, where they are known.

    Raises:
        ValueError: there is no such rank, or nodes (``parallel.node_size``) share a data-parallel group unevenly.
    """
    if micro_batches is None:
        micro_batches = config.train.micro_batches(placement.data)
    formula = _Formula(config, placement, rank, rank_buffers(config, placement, rank) if buffers is None else buffers)
    per_micro_batch = formula.volume(message for stage in formula.stages for message in formula.micro_batch(stage))
    per_step = formula.volume(formula.step())
    repeated = CommunicationVolume({key: traffic * micro_batches for key, traffic in per_micro_batch.traffic.items()})
    return CommunicationVolume.sum([repeated, per_step])


class _Formula:
    """The terms for one rank."""

    def __init__(self, config: PretrainConfig, placement: Placement, rank: int, buffers: Sequence[BufferPlan]) -> None:
        self.config, self.placement, self.rank = config, placement, rank
        self.own = placement.coordinates(rank)
        self.stages = placement.chunks(self.own.pipeline)
        self.element = _ELEMENT_BYTES[config.train.precision]
        self.sizes = placement.group_sizes
        self.ranks = placement.groups(rank)
        self.buffers = buffers
        self.sizes |= self._factors()
        batch, length = config.train.micro_batch_size, config.data.sequence_length
        self.length, self.batch = length, batch
        self.context_tokens = batch * length // placement.context
        self.tokens = self.context_tokens // placement.tensor
        self.hidden = placement.spec.hidden_size
        self.gathered = self.context_tokens * self.hidden * self.element
        """Bytes of the hidden states of all tensor-parallel ranks."""

    def volume(self, messages: Iterator[Message]) -> CommunicationVolume:
        """Adds messages up; a group of one rank exchanges nothing."""
        total: dict[tuple[str, Kind], Traffic] = {}
        for group, kind, payload in messages:
            size = self.sizes[group]
            if size == 1:
                continue
            # Keys and values go to others only; of uniformly routed tokens one in every g stays.
            to_others = payload if group == "cp" or kind is Kind.SEND else payload * (size - 1) / size
            traffic = Traffic(1, payload, wire_bytes(kind, payload, size, to_others))
            total[group, kind] = total.get((group, kind), Traffic()) + traffic
        return CommunicationVolume(total)

    # ------------------------------------------------------------------------------ of one micro-batch

    def micro_batch(self, stage: Stage) -> Iterator[Message]:
        """Of one micro-batch's way through a stage, forward and backward."""
        spec = self.placement.spec
        if stage.is_first:
            yield from self._embedding()
        for index in stage.layers:
            yield from self._layer(spec.layers[index])
        if stage.is_last:
            yield from self._loss()
            for depth in spec.mtp[: self.placement.mtp_depths]:
                yield from self._embedding()
                yield from self._layer(depth.layer)
                yield from self._loss()
        yield from self._sends(stage)

    def _embedding(self) -> Messages:
        """Each rank has looked up its rows of the vocabulary; the sum is shared out over the sequence."""
        return (
            Message("tp", Kind.REDUCE_SCATTER, self.gathered),
            Message("tp", Kind.ALL_GATHER, self.gathered),
        )

    def _loss(self) -> Messages:
        """Hidden states for every rank's rows of the head; two numbers per token for the softmax over all."""
        return (
            Message("tp", Kind.ALL_GATHER, self.gathered),
            Message("tp", Kind.ALL_GATHER, self.placement.tensor * 2 * self.context_tokens * _FP32),
            Message("tp", Kind.REDUCE_SCATTER, self.gathered),
        )

    def _sends(self, stage: Stage) -> Iterator[Message]:
        """Hidden states onwards and their gradients back."""
        # Of two stages Megatron's odd one sends over the default group, so that both directions overlap.
        group = "world" if self.placement.pipeline == 2 and self.own.pipeline == 1 else "pp"
        for end in (stage.is_last, stage.is_first):
            if not end and self.placement.pipeline > 1:
                yield Message(group, Kind.SEND, self.tokens * self.hidden * self.element)

    def _layer(self, layer: LayerSpec) -> Messages:
        attention = self._projected(self._keys(layer.attention))
        attention_messages = attention.run_again() if "attention" in layer.recompute else attention.all()
        again: Messages = ()
        if isinstance(layer.ffn, MoeFfnSpec):
            dispatch = self._dispatch(layer.ffn)
            if "moe_permutation" in layer.recompute:
                again = dispatch.forward
            ffn = self._balance() + dispatch + self._combine(layer.ffn) + self._projected(_Exchange())
        else:
            ffn = self._projected(_Exchange())
        return attention_messages + (ffn.run_again() if "ffn" in layer.recompute else ffn.all()) + again

    def _projected(self, between: _Exchange) -> _Exchange:
        """A block between Megatron's column-parallel and row-parallel layer. The former gathers the sequence,
        and gathers it again for its weight's gradient; the latter shares the sum out over the sequence."""
        gather = Message("tp", Kind.ALL_GATHER, self.gathered)
        scatter = Message("tp", Kind.REDUCE_SCATTER, self.gathered)
        return _Exchange(
            forward=(gather, *between.forward),
            last=(scatter,),
            backward=(gather, *between.backward, gather, scatter),
        )

    def _keys(self, attention: AttentionSpec) -> _Exchange:
        """Keys and values that other context-parallel ranks need, and back the gradients of those received."""
        size, rank = self.placement.context, self.own.context
        if size == 1:
            return _Exchange()
        from steptron.parallel.key_exchange import rows_received, rows_sent

        groups = attention.num_kv_groups // self.placement.tensor
        row = self.batch * groups * 2 * attention.head_dim * self.element
        sent = rows_sent(self.length, size, rank, attention.window)
        received = rows_received(self.length, size, rank, attention.window)
        return _Exchange(
            forward=(Message("cp", Kind.ALL_TO_ALL, sent * row),),
            backward=(Message("cp", Kind.ALL_TO_ALL, received * row),),
        )

    def _balance(self) -> _Exchange:
        """Probabilities and counts of the EP-group loss."""
        groups = self.config.balance.ep_groups or self.placement.expert
        return _Exchange(forward=(Message("tp_cp", Kind.ALL_REDUCE, 2 * groups * _FP32),))

    def _dispatch(self, ffn: MoeFfnSpec) -> _Exchange:
        """Tokens and routing weights (fp32) to the experts."""
        match self.config.parallel.dispatcher:
            case "alltoall":
                copies = self.tokens * ffn.top_k
                there_and_back = (
                    Message("ep", Kind.ALL_TO_ALL, copies * self.hidden * self.element),
                    Message("ep", Kind.ALL_TO_ALL, copies * _FP32),
                )
                counts = Message("tp_ep", Kind.ALL_GATHER, self.placement.expert * ffn.num_experts * _INT64)
                return _Exchange(forward=(counts, *there_and_back), backward=there_and_back)
            case "allgather":
                tokens = self.placement.expert * self.tokens
                hidden = tokens * self.hidden * self.element
                weights = tokens * ffn.num_experts * _FP32
                return _Exchange(
                    forward=(
                        Message("tp_ep", Kind.ALL_GATHER, tokens * ffn.num_experts * _BOOL),
                        Message("tp_ep", Kind.ALL_GATHER, weights),
                        Message("tp_ep", Kind.ALL_GATHER, hidden),
                    ),
                    backward=(
                        Message("tp_ep", Kind.REDUCE_SCATTER, weights),
                        Message("tp_ep", Kind.REDUCE_SCATTER, hidden),
                    ),
                )
            case "flex":
                message = Message("ep", Kind.ALL_TO_ALL, self._deep_ep_bytes(ffn))
                return _Exchange(forward=(message,), backward=(message,))

    def _combine(self, ffn: MoeFfnSpec) -> _Exchange:
        """The experts' outputs back to the tokens' ranks."""
        match self.config.parallel.dispatcher:
            case "alltoall":
                message = Message("ep", Kind.ALL_TO_ALL, self.tokens * ffn.top_k * self.hidden * self.element)
            case "allgather":
                # In the dtype of the routing weights.
                payload = self.placement.expert * self.tokens * self.hidden * _FP32
                return _Exchange(
                    forward=(Message("tp_ep", Kind.REDUCE_SCATTER, payload),),
                    backward=(Message("tp_ep", Kind.ALL_GATHER, payload),),
                )
            case "flex":
                message = Message("ep", Kind.ALL_TO_ALL, self._deep_ep_bytes(ffn))
        return _Exchange(forward=(message,), backward=(message,))

    def _deep_ep_bytes(self, ffn: MoeFfnSpec) -> int:
        ranks, experts = self.placement.expert, ffn.num_experts
        none_there = math.comb(experts - experts // ranks, ffn.top_k) / math.comb(experts, ffn.top_k)
        return round(self.tokens * ranks * (1 - none_there) * self.hidden * self.element)

    # -------------------------------------------------------------------------------------- of a step

    def step(self) -> Iterator[Message]:
        """What a step does once."""
        depths = self.placement.mtp_depths
        yield Message("dp", Kind.ALL_REDUCE, (2 + depths) * _INT64)  # numbers of tokens
        yield from self._gradients()
        # Sums of squares of the gradient norm, and numbers of updates that were not finite.
        yield Message("world", Kind.ALL_GATHER, self.sizes["world"] * 2 * _FP64)
        yield from self._update()
        spec = self.placement.spec
        experts = self.config.model.moe.num_experts
        yield Message("world", Kind.ALL_REDUCE, len(spec.moe_layers) * experts * _INT64)
        yield Message("world", Kind.ALL_REDUCE, (6 + depths) * _FP64)  # losses, confidence, flags

    def _gradients(self) -> Iterator[Message]:
        """Gradients in fp32 over the ranks that share their parameters, span by span; the embedding's over both
        stages that use it, of what this rank has the sum of."""
        for buffer in self.buffers:
            layout = buffer.layout
            scatters = layout.reduction is Reduction.REDUCE_SCATTER
            for span in layout.spans:
                yield from self._over_nodes(
                    buffer.replicas, Kind.REDUCE_SCATTER if scatters else Kind.ALL_REDUCE, span.size, _FP32
                )
            if buffer.is_shared_embedding:
                parts = [span.size // layout.ranks for span in layout.spans] if scatters else [layout.length]
                yield from (Message("embd", Kind.ALL_REDUCE, part * _FP32) for part in parts)

    def _update(self) -> Iterator[Message]:
        """Parts of the matrices that tensor parallelism cuts, to be orthogonalised whole; updated parameters."""
        owned = owned_pieces(self.config, self.placement, self.rank, self.buffers)
        for batch in muon_batches(owned, self.config.optimizer, self.config.train.deterministic):
            if batch.parts > 1:
                yield Message("tp", Kind.ALL_GATHER, len(batch.indices) * batch.short * batch.long * _FP32)
        for buffer in self.buffers:
            group, layout = buffer.replicas, buffer.layout
            if layout.has_cells:
                for span in layout.spans:
                    yield from self._over_nodes(group, Kind.ALL_GATHER, span.size, self.element)
            else:
                for piece in buffer.pieces:
                    yield Message(self._whole(group), Kind.BROADCAST, (piece.stop - piece.start) * self.element)

    def _over_nodes(self, group: str, kind: Kind, elements: int, element: int) -> Iterator[Message]:
        """A collective over ranks that hold the same parameters: within nodes and between them where both have some."""
        intra, inter = f"{group}.{Factor.INTRA}", f"{group}.{Factor.INTER}"
        if self._whole(group) != group or intra not in self.sizes:
            yield Message(self._whole(group), kind, elements * element)
            return
        part = -(-elements // self.sizes[intra]) * element
        whole = self.sizes[intra] * part
        if kind is not Kind.ALL_GATHER:
            yield Message(intra, Kind.REDUCE_SCATTER, whole)
        yield Message(inter, kind, part)
        if kind is not Kind.REDUCE_SCATTER:
            yield Message(intra, Kind.ALL_GATHER, whole)

    def _whole(self, group: str) -> str:
        """What a group's collectives over all its ranks are counted as: where all of them are on one node, or each
        is on another, those of that factor."""
        intra, inter = (self.sizes.get(f"{group}.{factor}") for factor in (Factor.INTRA, Factor.INTER))
        if inter == 1:
            return f"{group}.{Factor.INTRA}"
        return f"{group}.{Factor.INTER}" if intra == 1 else group

    def _factors(self) -> dict[str, int]:
        """Ranks within nodes and between them, of the groups that parameters are shared over."""
        node_size = self.config.parallel.node_size
        if node_size is None:
            return {}
        sizes: dict[str, int] = {}
        for group in {buffer.replicas for buffer in self.buffers}:
            nodes = split_by_node(self.ranks[group], node_size)
            sizes |= {f"{group}.{Factor.INTRA}": len(nodes[0]), f"{group}.{Factor.INTER}": len(nodes)}
        return sizes
