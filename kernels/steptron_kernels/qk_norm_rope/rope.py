"""Rotary position embedding of queries or keys: half rotation of the leading dimensions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def apply_rope(x_SBnD: Tensor, cos_SB1R: Tensor, sin_SB1R: Tensor) -> Tensor:
    """Rotates dimension m with dimension m + R, for m < R; dimensions from 2R on pass unchanged.

    Args:
        x_SBnD: [S, B, n, D] queries or keys.
        cos_SB1R: [S, B, 1, R] cosines.
        sin_SB1R: [S, B, 1, R] sines.

    Returns:
        [S, B, n, D], a new contiguous tensor.

    Raises:
        ValueError: the tables rotate more dimensions than there are.
    """
    check_rotation(cos_SB1R, x_SBnD.shape[-1])
    rotated: Tensor = _Rotation.apply(x_SBnD, cos_SB1R, sin_SB1R)
    return rotated


def check_rotation(cos_SB1R: Tensor, head_dim: int) -> None:
    """Raises ValueError if the tables rotate more dimensions than a head has."""
    if 2 * cos_SB1R.shape[-1] > head_dim:
        raise ValueError(
            f"the tables rotate {2 * cos_SB1R.shape[-1]} dimensions, but a head has {head_dim}: "
            "rotary_dim must not exceed head_dim"
        )


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
