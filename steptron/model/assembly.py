"""The model of one pipeline stage, assembled from specs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from steptron.data.batch import MicroBatch
from steptron.model.balance import BalanceContext
from steptron.model.block import TransformerLayer
from steptron.model.layer_spec import ModelSpec
from steptron.model.linear import column_parallel, leave_uninitialised
from steptron.model.moe import MoeFfn
from steptron.model.mtp import MtpDepth, mtp_loss_mask
from steptron.model.norm import build_norm
from steptron.model.parameter_shards import vocabulary_rows
from steptron.model.router import Router
from steptron.model.sequence import SequenceContext, shift_left
from steptron.model.stages import Stage
from steptron.model.transformer_config import StepConfig
from steptron.model.value_head import ValueHead
from steptron.parallel.sequence_shard import SequenceShard
from steptron_kernels.linear_cross_entropy import plain as plain_linear_cross_entropy


@dataclass(frozen=True)
class Hidden:
    """Hidden states of the last stage: normed for the heads, one per output, of this rank's tokens."""

    main_SBH: torch.Tensor
    mtp_SBH: tuple[torch.Tensor, ...]


class StepModel(MegatronModule):
    """One stage of a Step-3.5-style model (a model chunk, where a rank holds several).

    Parameter names are the logical names of ``ModelSpec.parameters()`` on every stage: layers keep
    their global index. The last stage holds its own copy of the embedding when it runs MTP and is
    not the first stage too; ``embedding_is_copy`` says so.

    Of every sequence the stage works on the tokens of its context-parallel rank; with tensor parallelism
    the hidden states between blocks are further split over those ranks (sequence parallelism).

    Args:
        spec: the whole model.
        stage: the part that this process holds.
        config: Megatron-Core's configuration.
        groups: process groups.
        mtp_depths: MTP depths that run, counted from the nearest. Depths beyond are kept, frozen.
        freeze_router: router weights get no gradient.
        freeze_value_head: nor does the value head.
        freeze_backbone: nor does anything but the MTP depths that run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        config: StepConfig,
        groups: ProcessGroupCollection,
        mtp_depths: int | None = None,
        freeze_router: bool = False,
        freeze_value_head: bool = False,
        freeze_backbone: bool = False,
    ) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.spec = spec
        self.stage = stage
        self._groups = groups
        self.mtp_depths = len(spec.mtp) if mtp_depths is None else mtp_depths
        self._padded_vocabulary = groups.tp.size() * vocabulary_rows(spec.vocab_size, groups.tp.size())
        runs_mtp = stage.is_last and self.mtp_depths > 0
        self.embedding_is_copy = runs_mtp and not stage.is_first
        if stage.is_first or runs_mtp:
            self.embedding = VocabParallelEmbedding(
                self._padded_vocabulary,
                spec.hidden_size,
                init_method=leave_uninitialised,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=groups.tp,
            )
        self.layers = torch.nn.ModuleDict(
            {str(index): TransformerLayer(spec.layers[index], config, groups) for index in stage.layers}
        )
        if stage.is_last:
            self.final_norm = build_norm(spec.hidden_size, spec.norm_eps, config)
            self.head = column_parallel(spec.hidden_size, self._padded_vocabulary, config, groups.tp)
            self.mtp = torch.nn.ModuleList(MtpDepth(depth, config, groups) for depth in spec.mtp)
            self.mtp[self.mtp_depths :].requires_grad_(False)
            if spec.value_head:
                self.value_head = ValueHead(spec.hidden_size, config).requires_grad_(not freeze_value_head)
        if freeze_backbone:
            running = {f"mtp.{depth}." for depth in range(self.mtp_depths)}
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name.startswith(tuple(running)))
        if freeze_router:
            for router in self.routers().values():
                router.requires_grad_(False)
        self._cross_entropy = (
            functools.partial(
                plain_linear_cross_entropy.linear_cross_entropy, group=groups.tp, vocab_size=spec.vocab_size
            )
            if groups.tp.size() > 1
            else config.kernels.linear_cross_entropy
        )
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        """Receives the stage's input from Megatron-Core's schedules."""
        (self._input,) = tensors

    def routers(self) -> dict[int, Router]:
        """The routers of this stage, by layer index."""
        return {int(i): layer.ffn.router for i, layer in self.layers.items() if isinstance(layer.ffn, MoeFfn)}

    def logical_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by logical name, as ``ModelSpec.parameters()`` names them."""
        yield from self.named_parameters()
        yield from self.named_buffers()

    def forward(self, batch: MicroBatch, balance: BalanceContext | None = None) -> torch.Tensor:
        """Runs the stage.

        Args:
            batch: the micro-batch, whole sequences on every rank.
            balance: where MoE layers record routing; None in evaluation.

        Returns:
            Hidden states [S, B, H] of this rank's tokens; on the last stage, the summed cross entropies
            [1 + depths] of the main head and of each MTP depth that runs, over the tokens in their loss masks:
            those of this context-parallel rank, the same on all tensor-parallel ranks.
        """
        sequence = self._sequence(batch)
        hidden = self._run_layers(batch, sequence, balance)
        if not self.stage.is_last:
            return hidden
        outputs = self._heads(hidden, batch, sequence)
        shard = sequence.shard
        sums = [self._loss(outputs.main_SBH, self.head.weight, batch.labels_BS, batch.loss_mask_BS, shard)]
        for k, mtp_hidden in enumerate(outputs.mtp_SBH):
            labels = shift_left(batch.labels_BS, k + 1, 0)
            sums.append(self._loss(mtp_hidden, self.mtp_head(k), labels, mtp_loss_mask(batch, k + 1), shard))
        return torch.stack(sums)

    def logits(self, batch: MicroBatch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Runs the stage as :meth:`forward` does, up to the logits instead of the losses.

        Returns:
            Hidden states [S, B, H] of this rank's tokens; on the last stage, main logits [B, S, V] and MTP logits
            [depths, B, S, V], fp32, of the tokens of this context-parallel rank, the same on all tensor-parallel ranks.
        """
        sequence = self._sequence(batch)
        hidden = self._run_layers(batch, sequence, None)
        if not self.stage.is_last:
            return hidden
        outputs = self._heads(hidden, batch, sequence)
        heads = [self.head.weight, *(self.mtp_head(k) for k in range(self.mtp_depths))]
        hidden_SBH = [outputs.main_SBH, *outputs.mtp_SBH]
        stacked = torch.stack([self.logits_of(h, head) for h, head in zip(hidden_SBH, heads, strict=True)])
        logits = stacked.transpose(1, 2).float()
        return logits[0], logits[1:]

    def values(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """A critic's values from the hidden states that the last layer puts out; of the last stage.

        Args:
            hidden_SBH: of this rank's tokens, before the final norm.

        Returns:
            [S, B], fp32, of the same tokens.

        Raises:
            ValueError: the model has no value head, or not on this stage.
        """
        if not (self.stage.is_last and self.spec.value_head):
            raise ValueError("values need a model with a value head (model.value_head), on its last pipeline stage")
        values_SB: torch.Tensor = self.value_head(self.final_norm(hidden_SBH))
        return values_SB

    def logits_of(self, hidden_SBH: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Logits [S, B, V] of normed hidden states, by an output matrix.

        Of this context-parallel rank's tokens; tensor-parallel ranks hold runs of the padded vocabulary.
        """
        if self._groups.tp.size() == 1:
            whole: torch.Tensor = self.config.kernels.linear(hidden_SBH, weight)
            return whole
        hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=self._groups.tp)
        part_SBV = self.config.kernels.linear(hidden_SBH, weight)
        padded_SBV = gather_from_tensor_model_parallel_region(part_SBV, group=self._groups.tp)
        return padded_SBV[..., : self.spec.vocab_size]

    def _sequence(self, batch: MicroBatch) -> SequenceContext:
        context = self._groups.cp
        shard = SequenceShard.balanced(batch.tokens_BS.shape[1], context.rank(), context.size())
        return SequenceContext(batch.positions_BS, batch.documents_BS, shard, context)

    def _run_layers(self, batch: MicroBatch, sequence: SequenceContext, balance: BalanceContext | None) -> torch.Tensor:
        if self.stage.is_first:
            hidden = self.embed(sequence.shard.take(batch.tokens_BS)).contiguous()
        else:
            assert self._input is not None, "a later pipeline stage needs its input tensor"
            hidden = self._input
        for layer in self.layers.values():
            hidden = layer(hidden, sequence, balance)
        return hidden

    def embed(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """[S, B, H]; with sequence parallelism this rank's run of the S tokens."""
        embedded = self.embedding(tokens_BS)
        # Where it reduce-scatters over the sequence, Megatron's module has put that axis first already.
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1)

    def _heads(self, hidden: torch.Tensor, batch: MicroBatch, sequence: SequenceContext) -> Hidden:
        main = self.final_norm(hidden)
        chained, normed = hidden, []
        for k, depth in enumerate(self.running_depths()):
            if k == 0 and not depth.spec.pre_norm_chain:
                chained = main
            following = shift_left(batch.tokens_BS, k + 1, 0)
            output, chained = depth(self.embed(sequence.shard.take(following)), chained, sequence)
            normed.append(output)
        return Hidden(main, tuple(normed))

    def running_depths(self) -> list[MtpDepth]:
        """The MTP depths that run, the nearest first."""
        return [depth for depth in self.mtp[: self.mtp_depths] if isinstance(depth, MtpDepth)]

    def mtp_head(self, k: int) -> torch.Tensor:
        """The output matrix of an MTP depth, its own or the main model's."""
        own = self.running_depths()[k].head
        return (self.head if own is None else own).weight

    def _loss(
        self,
        hidden_SBH: torch.Tensor,
        weight: torch.Tensor,
        labels_BS: torch.Tensor,
        mask_BS: torch.Tensor,
        shard: SequenceShard,
    ) -> torch.Tensor:
        if self.config.sequence_parallel:
            # Each rank's gradient comes from its own rows of the head: the way back adds them up.
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=self._groups.tp)
        labels_T, mask_T = shard.take(labels_BS).t().flatten(), shard.take(mask_BS).t().flatten()
        return self._cross_entropy(hidden_SBH.flatten(0, 1), weight, labels_T, mask_T)
