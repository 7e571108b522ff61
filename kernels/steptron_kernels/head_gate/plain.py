"""Head-wise attention gate as torch operations."""

from __future__ import annotations

import torch
from torch import Tensor


def head_gate(o_SBnD: Tensor, gate_SBn: Tensor) -> Tensor:
    """``o * sigmoid(gate)`` per head; the sigmoid and the product are float32 (float64 for float64).

    Args:
        o_SBnD: [S, B, n, D] outputs of the heads.
        gate_SBn: [S, B, n] logits.

    Returns:
        [S, B, n, D] in the dtype of the outputs.
    """
    weight_SBn = torch.sigmoid(gate_SBn.to(torch.promote_types(gate_SBn.dtype, torch.float32)))
    return (o_SBnD * weight_SBn.unsqueeze(-1)).to(o_SBnD.dtype)
