"""Rotary position embeddings: frequencies, with llama3 scaling, and the tables of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
    """Cosines and sines for :func:`steptron_kernels.qk_norm_rope.plain.qk_norm_rope`.

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
