"""SwiGLU with the release's activation clipping, as torch operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor, limit: float | None, clamp_after_silu: bool = True) -> Tensor:
    """SiLU(gate) * up, optionally clipped.

    With a limit L: ``min(silu(gate), L) * clamp(up, -L, L)``, the clamp on the gate branch after
    SiLU and one-sided (released model). ``clamp_after_silu=False`` clips the gate before SiLU
    instead, as Megatron-Core does. Gradients pass where a value is at the limit, as torch's clamp has it.

    Args:
        gate_up: [..., 2F], gate in the first half of the last axis, up in the second.
        limit: L, or None for no clipping.
        clamp_after_silu: where the gate is clipped.

    Returns:
        [..., F]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is None:
        return F.silu(gate) * up
    gate = F.silu(gate).clamp(max=limit) if clamp_after_silu else F.silu(gate.clamp(max=limit))
    return gate * up.clamp(-limit, limit)
