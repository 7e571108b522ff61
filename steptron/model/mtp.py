"""Multi-token prediction: module k at position t predicts token t + 2 + k (k from 0)."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from steptron.data.batch import MicroBatch
from steptron.model.block import TransformerLayer
from steptron.model.layer_spec import MtpSpec
from steptron.model.linear import Linear, column_parallel
from steptron.model.norm import build_norm
from steptron.model.parameter_shards import vocabulary_rows
from steptron.model.sequence import AttentionContext, shift_left
from steptron.model.transformer_config import StepConfig


class MtpDepth(MegatronModule):
    """projection([norm(embedding of token t+1+k) ; norm(previous hidden)]), one layer, norm, head.

    ``head`` is None when the depth uses the main model's output matrix.
    """

    def __init__(self, spec: MtpSpec, config: StepConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.spec = spec
        hidden, eps = spec.layer.hidden_size, spec.layer.norm_eps
        self.embedding_norm = build_norm(hidden, eps, config)
        self.hidden_norm = build_norm(hidden, eps, config)
        self.projection = Linear(2 * hidden, hidden, config)
        self.layer = TransformerLayer(spec.layer, config, groups)
        self.final_norm = build_norm(hidden, eps, config)
        padded_vocabulary = groups.tp.size() * vocabulary_rows(spec.vocab_size, groups.tp.size())
        self.head = column_parallel(hidden, padded_vocabulary, config, groups.tp) if spec.own_head else None

    def forward(
        self, embedding_SBH: torch.Tensor, hidden_SBH: torch.Tensor, sequence: AttentionContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One depth.

        Args:
            embedding_SBH: embeddings of the tokens that follow by 1 + k.
            hidden_SBH: hidden state of the depth before (the main model's for k = 0).

        Returns:
            The normed hidden state for the head, and the state handed to the next depth.
        """
        y = torch.cat([self.embedding_norm(embedding_SBH), self.hidden_norm(hidden_SBH)], dim=-1)
        y = self.layer(self.projection(y), sequence, balance=None)
        normed = self.final_norm(y)
        return normed, y if self.spec.pre_norm_chain else normed


def mtp_loss_mask(batch: MicroBatch, depth: int) -> torch.Tensor:
    """bool [B, S]: whether MTP depth k (from 1) has a target at t: token t + 1 + k counts in the
    loss and lies in the same document."""
    same_document = shift_left(batch.documents_BS, depth, -1) == batch.documents_BS
    return shift_left(batch.loss_mask_BS, depth, False) & same_document
