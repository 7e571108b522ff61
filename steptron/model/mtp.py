"""Multi-token prediction: module k at position t predicts token t + 2 + k (k from 0)."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from steptron.model.block import TransformerLayer
from steptron.model.init import leave_uninitialised
from steptron.model.layer_spec import MtpSpec
from steptron.model.norm import ZeroCentredRMSNorm
from steptron.model.sequence import SequenceContext


class MtpDepth(MegatronModule):
    """projection([norm(embedding of token t+1+k) ; norm(previous hidden)]), one layer, norm, head.

    ``head`` is None when the depth uses the main model's output matrix.
    """

    def __init__(self, spec: MtpSpec, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config)
        self.spec = spec
        hidden, eps, dtype = spec.layer.hidden_size, spec.layer.norm_eps, config.params_dtype
        self.embedding_norm = ZeroCentredRMSNorm(hidden, eps, dtype=dtype)
        self.hidden_norm = ZeroCentredRMSNorm(hidden, eps, dtype=dtype)
        self.projection = ColumnParallelLinear(
            2 * hidden,
            hidden,
            config=config,
            init_method=leave_uninitialised,
            bias=False,
            gather_output=True,
            tp_group=groups.tp,
        )
        self.layer = TransformerLayer(spec.layer, config, groups)
        self.final_norm = ZeroCentredRMSNorm(hidden, eps, dtype=dtype)
        self.head = output_matrix(spec.vocab_size, hidden, config, groups) if spec.own_head else None

    def forward(
        self, embedding_SBH: torch.Tensor, hidden_SBH: torch.Tensor, sequence: SequenceContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One depth.

        Args:
            embedding_SBH: embeddings of the tokens that follow by 1 + k.
            hidden_SBH: hidden state of the depth before (the main model's for k = 0).

        Returns:
            The normed hidden state for the head, and the state handed to the next depth.
        """
        y = torch.cat([self.embedding_norm(embedding_SBH), self.hidden_norm(hidden_SBH)], dim=-1)
        y, _ = self.projection(y)
        y = self.layer(y, sequence, balance=None)
        normed = self.final_norm(y)
        return normed, y if self.spec.pre_norm_chain else normed


def output_matrix(
    vocab_size: int, hidden_size: int, config: TransformerConfig, groups: ProcessGroupCollection
) -> ColumnParallelLinear:
    """An output matrix [V, H], split by vocabulary over tensor-parallel ranks."""
    return ColumnParallelLinear(
        hidden_size,
        vocab_size,
        config=config,
        init_method=leave_uninitialised,
        bias=False,
        gather_output=False,
        tp_group=groups.tp,
    )
