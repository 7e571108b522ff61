"""Residual sum and its zero-centred RMSNorm, as torch operations."""

from __future__ import annotations

from torch import Tensor

from steptron_kernels.rms_norm.plain import rms_norm


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds a layer's output to the residual stream and normalises the sum for the next layer.

    Args:
        x: [..., N], the residual stream.
        delta: [..., N], what is added to it.
        weight: [N], gamma - 1.
        eps: added to the mean square.

    Returns:
        ``x + delta`` and ``rms_norm(x + delta)`` (:func:`steptron_kernels.rms_norm.plain.rms_norm`), each [..., N].
    """
    total = x + delta
    return total, rms_norm(total, weight, eps)
