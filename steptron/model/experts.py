"""Routed experts as grouped matrix products: no padding to the largest, no loop per expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from steptron.model.activation import clamped_swiglu
from steptron.model.layer_spec import MoeFfnSpec


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    if a.dtype is torch.bfloat16 and a.device.type == "cpu":
        # torch builds a new oneDNN primitive for every group size it has not seen in bfloat16, which
        # takes longer than the product. The same operands in float32 give the same sums.
        return F.grouped_mm(a.float(), b.float(), offs=ends_E).to(a.dtype)
    return F.grouped_mm(a, b, offs=ends_E)


class GroupedLinear(torch.autograd.Function):
    """y[rows of group e] = x[rows of group e] @ W_e^T, on torch's grouped_mm.

    An own Function because grouped_mm's backward rejects gradients that are not contiguous, and
    leaves rows past the last offset (and, without any row, the whole weight gradient) undefined.
    """

    @staticmethod
    def forward(ctx, x_NK: torch.Tensor, w_EMK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_NK, w_EMK, ends_E)
        if x_NK.shape[0] == 0:
            return x_NK.new_empty(0, w_EMK.shape[1])
        return _grouped_mm(x_NK, w_EMK.transpose(1, 2), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NM: torch.Tensor):  # type: ignore[no-untyped-def]
        x_NK, w_EMK, ends_E = ctx.saved_tensors
        if x_NK.shape[0] == 0:
            return torch.zeros_like(x_NK), torch.zeros_like(w_EMK), None
        grad_NM = grad_NM.contiguous()
        grad_x = _grouped_mm(grad_NM, w_EMK, ends_E) if ctx.needs_input_grad[0] else None
        grad_w = _grouped_mm(grad_NM.t(), x_NK, ends_E) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def grouped_linear(x_NK: torch.Tensor, w_EMK: torch.Tensor, tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
    """Multiplies consecutive groups of rows by their expert's matrix.

    Args:
        x_NK: [N, K] rows sorted by expert, contiguous; fp32, bf16 or fp16.
        w_EMK: [E, M, K]; K and M rows must be multiples of 16 bytes.
        tokens_per_expert_E: int64 [E], summing to N; zeros are allowed.

    Returns:
        [N, M]
    """
    ends_E = tokens_per_expert_E.cumsum(0).to(device=x_NK.device, dtype=torch.int32)
    return GroupedLinear.apply(x_NK, w_EMK, ends_E)


class GroupedExperts(MegatronModule):
    """The routed experts that this process holds, stacked: gate_up [E, 2F, H], down [E, H, F]."""

    def __init__(self, spec: MoeFfnSpec, hidden_size: int, num_local_experts: int, config: TransformerConfig) -> None:
        super().__init__(config)
        self.spec = spec
        width = spec.expert_hidden_size
        dtype = config.params_dtype
        self.gate_up_projection = torch.nn.Parameter(
            torch.empty(num_local_experts, 2 * width, hidden_size, dtype=dtype)
        )
        self.down_projection = torch.nn.Parameter(torch.empty(num_local_experts, hidden_size, width, dtype=dtype))

    def forward(self, x_NH: torch.Tensor, tokens_per_expert_E: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
        """Weighted expert outputs.

        The routing weight multiplies the intermediate activations: the same product as weighting
        the output, over F instead of H columns.

        Args:
            x_NH: [N, H] rows sorted by expert.
            tokens_per_expert_E: int64 [E].
            weights_N: [N], fp32.
        """
        gate_up = grouped_linear(x_NH, self.gate_up_projection, tokens_per_expert_E)
        hidden = clamped_swiglu(gate_up, self.spec.expert_clamp, self.spec.clamp_after_silu)
        hidden = (hidden * weights_N.unsqueeze(-1)).to(x_NH.dtype)
        return grouped_linear(hidden, self.down_projection, tokens_per_expert_E)
