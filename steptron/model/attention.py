"""Self-attention of one layer: fused projection, per-head norms, RoPE, attention, head-wise gate, output."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from steptron.model.layer_spec import AttentionSpec
from steptron.model.linear import column_parallel, row_parallel
from steptron.model.norm import build_norm
from steptron.model.rope import rope_tables
from steptron.model.sequence import AttentionContext
from steptron.model.transformer_config import StepConfig


class SelfAttention(MegatronModule):
    """Grouped-query attention as the layer's spec describes it (facts of the release, 2.3).

    Order: projection, norm of each query and key head, RoPE, attention, head-wise gate, output
    projection. The gate is ``sigmoid(w_h . x)``, one per head, of the same normalised input as
    queries, keys and values; its sigmoid is float32. Everything layer-specific comes from ``spec``;
    the Megatron configuration holds only what all layers share.

    A tensor-parallel rank has equal runs of the query heads, the key-value groups that they read, and their
    gates.

    Parameters:
        input_projection.weight: rows [query; key; value; gate] of this rank's heads.
        query_norm.weight, key_norm.weight: [head_dim], shared by the heads.
        output_projection.weight: [hidden, query_size].
        sink: logits of this rank's heads, with ``spec.sink``.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        norm_eps: float,
        config: StepConfig,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            spec: the layer's attention.
            hidden_size: width of the residual stream.
            norm_eps: epsilon of the query and key norms.
            config: Megatron's configuration.
            tp_group: tensor-parallel group; Megatron's own when None.
        """
        super().__init__(config)
        tensor_ranks = config.tensor_model_parallel_size if tp_group is None else tp_group.size()
        self.spec = spec
        self._num_heads, self._num_groups = spec.num_heads // tensor_ranks, spec.num_kv_groups // tensor_ranks
        projected_size = (spec.num_heads + 2 * spec.num_kv_groups) * spec.head_dim + spec.num_heads * spec.gate
        self.input_projection = column_parallel(hidden_size, projected_size, config, tp_group)
        self.query_norm = build_norm(spec.head_dim, norm_eps, config)
        self.key_norm = build_norm(spec.head_dim, norm_eps, config)
        self.output_projection = row_parallel(spec.query_size, hidden_size, config, tp_group)
        if spec.sink:
            self.sink = nn.Parameter(torch.zeros(self._num_heads, dtype=config.params_dtype))
        else:
            self.register_parameter("sink", None)

    def forward(self, h_SBH: Tensor, context: AttentionContext) -> Tensor:
        """
        Args:
            h_SBH: [S, B, H], the normalised input of the layer, of this rank's tokens.
            context: their positions, and the keys that they see.

        Returns:
            [S, B, H], to be added to the residual.
        """
        spec, kernels = self.spec, self.config.kernels
        projected, _ = self.input_projection(h_SBH)
        cos, sin = context.once(
            ("rope", spec.rope, h_SBH.dtype),
            lambda: rope_tables(spec.rope, context.own_positions_BS, h_SBH.dtype),
        )
        q_SBnD, k_SBgD, v_SBgD, gate_SBn = kernels.qk_norm_rope(
            projected,
            self.query_norm.weight,
            self.key_norm.weight,
            cos,
            sin,
            self._num_heads,
            self._num_groups,
            self.query_norm.eps,
            spec.gate,
        )
        o_SBnD = context.attend(q_SBnD, k_SBgD, v_SBgD, spec.window, self.sink, kernels)
        if gate_SBn is not None:
            o_SBnD = kernels.head_gate(o_SBnD, gate_SBn)
        output_SBH, _ = self.output_projection(o_SBnD.flatten(2))
        return output_SBH
