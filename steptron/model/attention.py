"""Self-attention of one layer: fused projection, per-head norms, RoPE, attention, head-wise gate, output."""

from __future__ import annotations

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from steptron.model.attention_core import attend
from steptron.model.layer_spec import AttentionSpec
from steptron.model.linear import column_parallel, row_parallel
from steptron.model.norm import ZeroCentredRMSNorm
from steptron.model.rope import apply_rope, rope_tables
from steptron.model.sequence import SequenceContext


class SelfAttention(MegatronModule):
    """Grouped-query attention as the layer's spec describes it (facts of the release, 2.3).

    Order: projection, norm of each query and key head, RoPE, attention, head-wise gate, output
    projection. The gate is ``sigmoid(w_h . x)``, one per head, of the same normalised input as
    queries, keys and values; its sigmoid is float32. Everything layer-specific comes from ``spec``;
    the Megatron configuration holds only what all layers share.

    Parameters:
        input_projection.weight: rows [query; key; value; gate].
        query_norm.weight, key_norm.weight: [head_dim], shared by the heads.
        output_projection.weight: [hidden, query_size].
        sink: [num_heads] logits, with ``spec.sink``.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        norm_eps: float,
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            spec: the layer's attention.
            hidden_size: width of the residual stream.
            norm_eps: epsilon of the query and key norms.
            config: Megatron's configuration.
            tp_group: tensor-parallel group; Megatron's own when None.

        Raises:
            NotImplementedError: there is more than one tensor-parallel rank.
        """
        super().__init__(config)
        tensor_ranks = config.tensor_model_parallel_size if tp_group is None else tp_group.size()
        if tensor_ranks > 1:
            raise NotImplementedError(
                f"tensor parallelism is not supported yet: attention got {tensor_ranks} tensor-parallel ranks "
                "(set parallel.tensor to 1)"
            )
        self.spec = spec
        heads, groups = spec.num_heads // tensor_ranks, spec.num_kv_groups // tensor_ranks
        self._local_sizes = [heads * spec.head_dim, groups * spec.head_dim, groups * spec.head_dim]
        if spec.gate:
            self._local_sizes.append(heads)
        self.input_projection = column_parallel(hidden_size, sum(self._local_sizes) * tensor_ranks, config, tp_group)
        self.query_norm = ZeroCentredRMSNorm(spec.head_dim, norm_eps, dtype=config.params_dtype)
        self.key_norm = ZeroCentredRMSNorm(spec.head_dim, norm_eps, dtype=config.params_dtype)
        self.output_projection = row_parallel(spec.query_size, hidden_size, config, tp_group)
        if spec.sink:
            self.sink = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        else:
            self.register_parameter("sink", None)

    def forward(self, h_SBH: Tensor, context: SequenceContext) -> Tensor:
        """
        Args:
            h_SBH: [S, B, H], the normalised input of the layer.
            context: positions, documents and shard of the micro-batch.

        Returns:
            [S, B, H], to be added to the residual.
        """
        head_dim = self.spec.head_dim
        projected, _ = self.input_projection(h_SBH)
        q, k, v, *gate = projected.split(self._local_sizes, dim=-1)
        q_SBnD, k_SBgD, v_SBgD = (x.unflatten(-1, (-1, head_dim)) for x in (q, k, v))
        cos, sin = context.once(
            ("rope", self.spec.rope, h_SBH.dtype),
            lambda: rope_tables(self.spec.rope, context.positions_BS, h_SBH.dtype),
        )
        q_SBnD = apply_rope(self.query_norm(q_SBnD), cos, sin)
        k_SBgD = apply_rope(self.key_norm(k_SBgD), cos, sin)
        o_SBnD = attend(q_SBnD, k_SBgD, v_SBgD, context, self.spec.window, self.sink)
        if self.spec.gate:
            o_SBnD = gate_heads(o_SBnD, gate[0])
        output_SBH, _ = self.output_projection(o_SBnD.flatten(2))
        return output_SBH


def gate_heads(o_SBnD: Tensor, gate_SBn: Tensor) -> Tensor:
    """``o * sigmoid(gate)`` per head; the sigmoid and the product are float32 (float64 for float64)."""
    weight_SBn = torch.sigmoid(gate_SBn.to(torch.promote_types(gate_SBn.dtype, torch.float32)))
    return (o_SBnD * weight_SBn.unsqueeze(-1)).to(o_SBnD.dtype)
