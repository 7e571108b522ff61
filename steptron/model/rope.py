"""Rotary position embeddings: half rotation of the leading dimensions, with llama3 frequency scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron.model.layer_spec import RopeSpec


def rope_frequencies(spec: RopeSpec, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """Angle per position of each rotated pair: [rotary_dim / 2], in ``dtype``.

    Pair m turns by ``theta^(-2m/d)``, d the rotated width. llama3 scaling divides the frequencies
    that make at most ``low_freq_factor`` turns in the original length by ``factor``, keeps those
    that make at least ``high_freq_factor`` and blends linearly in between (facts of the release, 2.4).
    """
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=dtype, device=device) / spec.rotary_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.scaling is None:
        return frequencies
    scaling = spec.scaling
    turns = scaling.original_length * frequencies / (2.0 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)


def rope_tables(spec: RopeSpec, positions_BS: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for :func:`apply_rope`.

    Angles are float32 (float64 when ``dtype`` is float64), as in the released model; only the
    results are rounded to ``dtype``.

    Args:
        spec: base, rotated width and scaling.
        positions_BS: [B, S] positions.
        dtype: dtype of the activations.

    Returns:
        cos and sin, each [S, B, 1, rotary_dim / 2] in ``dtype``.
    """
    angle_dtype = torch.promote_types(dtype, torch.float32)
    frequencies = rope_frequencies(spec, angle_dtype, positions_BS.device)
    angles_SB1P = positions_BS.T.to(angle_dtype)[:, :, None, None] * frequencies
    return angles_SB1P.cos().to(dtype), angles_SB1P.sin().to(dtype)


def apply_rope(x_SBnD: Tensor, cos_SB1P: Tensor, sin_SB1P: Tensor) -> Tensor:
    """Rotates dimension m with dimension m + P, for m < P; dimensions from 2P on pass unchanged.

    Args:
        x_SBnD: [S, B, n, D] queries or keys.
        cos_SB1P: [S, B, 1, P] cosines.
        sin_SB1P: [S, B, 1, P] sines.

    Returns:
        [S, B, n, D], a new contiguous tensor.

    Raises:
        ValueError: the tables rotate more dimensions than there are.
    """
    if 2 * cos_SB1P.shape[-1] > x_SBnD.shape[-1]:
        raise ValueError(
            f"the tables rotate {2 * cos_SB1P.shape[-1]} dimensions, but a head has {x_SBnD.shape[-1]}: "
            "rotary_dim must not exceed head_dim"
        )
    rotated: Tensor = _Rotation.apply(x_SBnD, cos_SB1P, sin_SB1P)
    return rotated


class _Rotation(torch.autograd.Function):
    """A rotation is orthogonal: its backward is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, direction=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(d_out, cos, sin, direction=-1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    pairs = cos.shape[-1]
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    torch.mul(first, cos, out=rotated[..., :pairs]).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=rotated[..., pairs : 2 * pairs]).addcmul_(first, sin, value=direction)
    rotated[..., 2 * pairs :] = x[..., 2 * pairs :]
    return rotated
