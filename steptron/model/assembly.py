"""The model of one pipeline stage, assembled from specs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule

from steptron.data.batch import MicroBatch
from steptron.model.balance import BalanceContext
from steptron.model.block import TransformerLayer
from steptron.model.layer_spec import ModelSpec
from steptron.model.linear import column_parallel, leave_uninitialised
from steptron.model.moe import MoeFfn
from steptron.model.mtp import MtpDepth, mtp_loss_mask
from steptron.model.norm import build_norm
from steptron.model.router import Router
from steptron.model.sequence import SequenceContext, SequenceShard, shift_left
from steptron.model.stages import Stage
from steptron.model.transformer_config import StepConfig


@dataclass(frozen=True)
class Hidden:
    """Hidden states of the last stage: normed for the heads, one per output."""

    main_SBH: torch.Tensor
    mtp_SBH: tuple[torch.Tensor, ...]


class StepModel(MegatronModule):
    """One stage of a Step-3.5-style model.

    Parameter names are the logical names of ``ModelSpec.parameters()`` on every stage: layers keep
    their global index. The last stage holds its own copy of the embedding when it runs MTP and is
    not the first stage too; ``embedding_is_copy`` says so.

    Args:
        spec: the whole model.
        stage: the part that this process holds.
        config: Megatron-Core's configuration.
        groups: process groups.
        mtp_depths: MTP depths that run, counted from the nearest. Depths beyond are kept, frozen.
        freeze_router: router weights get no gradient.
    """

    def __init__(
        self,
        spec: ModelSpec,
        stage: Stage,
        config: StepConfig,
        groups: ProcessGroupCollection,
        mtp_depths: int | None = None,
        freeze_router: bool = False,
    ) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.spec = spec
        self.stage = stage
        self.mtp_depths = len(spec.mtp) if mtp_depths is None else mtp_depths
        runs_mtp = stage.is_last and self.mtp_depths > 0
        self.embedding_is_copy = runs_mtp and not stage.is_first
        if stage.is_first or runs_mtp:
            self.embedding = VocabParallelEmbedding(
                spec.vocab_size,
                spec.hidden_size,
                init_method=leave_uninitialised,
                config=config,
                tp_group=groups.tp,
            )
        self.layers = torch.nn.ModuleDict(
            {str(index): TransformerLayer(spec.layers[index], config, groups) for index in stage.layers}
        )
        if stage.is_last:
            self.final_norm = build_norm(spec.hidden_size, spec.norm_eps, config)
            self.head = column_parallel(spec.hidden_size, spec.vocab_size, config, groups.tp)
            self.mtp = torch.nn.ModuleList(MtpDepth(depth, config, groups) for depth in spec.mtp)
            self.mtp[self.mtp_depths :].requires_grad_(False)
        if freeze_router:
            for router in self.routers().values():
                router.requires_grad_(False)
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
            batch: the micro-batch.
            balance: where MoE layers record routing; None in evaluation.

        Returns:
            Hidden states [S, B, H]; on the last stage, the summed cross entropies [1 + depths] of
            the main head and of each MTP depth that runs, over the tokens in their loss masks.
        """
        sequence = _sequence(batch)
        hidden = self._run_layers(batch, sequence, balance)
        if not self.stage.is_last:
            return hidden
        outputs = self._heads(hidden, batch, sequence)
        sums = [self._loss(outputs.main_SBH, self.head.weight, batch.labels_BS, batch.loss_mask_BS)]
        for k, mtp_hidden in enumerate(outputs.mtp_SBH):
            labels = shift_left(batch.labels_BS, k + 1, 0)
            sums.append(self._loss(mtp_hidden, self._mtp_head(k), labels, mtp_loss_mask(batch, k + 1)))
        return torch.stack(sums)

    def logits(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Main logits [B, S, V] and MTP logits [depths, B, S, V], fp32, of the last stage."""
        sequence = _sequence(batch)
        outputs = self._heads(self._run_layers(batch, sequence, None), batch, sequence)
        main, _ = self.head(outputs.main_SBH)
        mtp = [self.config.kernels.linear(hidden, self._mtp_head(k)) for k, hidden in enumerate(outputs.mtp_SBH)]
        stacked = torch.stack([main, *mtp]).transpose(1, 2).float()
        return stacked[0], stacked[1:]

    def _run_layers(self, batch: MicroBatch, sequence: SequenceContext, balance: BalanceContext | None) -> torch.Tensor:
        if self.stage.is_first:
            hidden = self.embedding(batch.tokens_BS).transpose(0, 1).contiguous()
        else:
            assert self._input is not None, "a later pipeline stage needs its input tensor"
            hidden = self._input
        for layer in self.layers.values():
            hidden = layer(hidden, sequence, balance)
        return hidden

    def _heads(self, hidden: torch.Tensor, batch: MicroBatch, sequence: SequenceContext) -> Hidden:
        main = self.final_norm(hidden)
        chained, normed = hidden, []
        for k, depth in enumerate(self._running_depths()):
            if k == 0 and not depth.spec.pre_norm_chain:
                chained = main
            following = shift_left(batch.tokens_BS, k + 1, 0)
            embedding = self.embedding(following).transpose(0, 1)
            output, chained = depth(embedding, chained, sequence)
            normed.append(output)
        return Hidden(main, tuple(normed))

    def _running_depths(self) -> list[MtpDepth]:
        return [depth for depth in self.mtp[: self.mtp_depths] if isinstance(depth, MtpDepth)]

    def _mtp_head(self, k: int) -> torch.Tensor:
        own = self._running_depths()[k].head
        return (self.head if own is None else own).weight

    def _loss(
        self, hidden_SBH: torch.Tensor, weight: torch.Tensor, labels_BS: torch.Tensor, mask_BS: torch.Tensor
    ) -> torch.Tensor:
        return self.config.kernels.linear_cross_entropy(
            hidden_SBH.flatten(0, 1), weight, labels_BS.t().flatten(), mask_BS.t().flatten()
        )


def _sequence(batch: MicroBatch) -> SequenceContext:
    return SequenceContext(batch.positions_BS, batch.documents_BS, SequenceShard.whole(batch.tokens_BS.shape[1]))
