"""Head-wise attention gate in C++, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def head_gate(o_SBnD: Tensor, gate_SBn: Tensor) -> Tensor:
    """As :func:`steptron_kernels.head_gate.plain.head_gate`, for float32."""
    y: Tensor = _HeadGate.apply(o_SBnD.flatten(0, 1).contiguous(), _rows(gate_SBn))
    return y.view_as(o_SBnD)


def _rows(gate_SBn: Tensor) -> Tensor:
    """[S B, n]: a view where the gates are columns of a projection."""
    gate_Rn = gate_SBn.flatten(0, 1)
    return gate_Rn if gate_Rn.stride(1) == 1 else gate_Rn.contiguous()


class _HeadGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o_RnD: Tensor, gate_Rn: Tensor) -> Tensor:
        ctx.save_for_backward(o_RnD, gate_Rn)
        y: Tensor = torch.ops.steptron_kernels.head_gate(o_RnD, gate_Rn)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RnD: Tensor) -> tuple[Tensor, Tensor]:
        d_o, d_gate = torch.ops.steptron_kernels.head_gate_backward(dy_RnD.contiguous(), *ctx.saved_tensors)
        return d_o, d_gate
