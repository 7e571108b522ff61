"""Polar Express as torch operations: matrices made orthogonal by polynomials, on any device.

``X = M / (1.01 ||M||_F + 1e-7)``, then per row (a, b, c) of coefficients ``A = X X^T``, ``B = bA + cA A``,
``X <- aX + B X`` (arXiv 2505.16932, Algorithm 1). X is the smaller side's way round: matrices with more rows than
columns are transposed.

A, B and X are each rounded once, from products and sums that are float32 (float64 for float64). On the CPU, matrix
products of float16 tensors are hundreds of times slower than those of float32: there half precision means float32
tensors whose values are rounded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from steptron_kernels.polar_express.coefficients import Row

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What the iteration can be rounded to."""


def polar_express(m_NRC: Tensor, rows: Sequence[Row], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Orthogonalises every matrix of a batch.

    A zero matrix gives zeros. NaN or infinity in a matrix makes all of that matrix's results NaN and touches no other
    matrix; nothing else gives NaN or infinity, at whatever scale.

    Args:
        m_NRC: [N, R, C], float32 or float64.
        rows: coefficients of the steps, as from :func:`steptron_kernels.polar_express.coefficients.polar_express_rows`.
        dtype: what X, A and B are rounded to: float16, bfloat16, float32, or float64 for float64 matrices.

    Returns:
        The result [N, R, C] in the dtype of ``m_NRC``; and [N], float32, the largest magnitude among the entries of
        every X (the first one too), A and B, by which an overflow shows before it happens.

    Raises:
        ValueError: ``m_NRC`` is no such batch, or ``dtype`` is none of these.
    """
    check(m_NRC, dtype)
    is_tall = m_NRC.shape[1] > m_NRC.shape[2]
    with _exact_sums():
        o_NRC, largest_N = _iterate(m_NRC.mT if is_tall else m_NRC, rows, dtype)
    return (o_NRC.mT if is_tall else o_NRC).to(m_NRC.dtype), largest_N


@contextlib.contextmanager
def _exact_sums() -> Iterator[None]:
    """Within it CUDA adds products up in float32 throughout: by default torch lets it round partial sums to 16 bits,
    and float32 operands to TF32 where that was allowed."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_tf32")
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def check(m_NRC: Tensor, dtype: torch.dtype) -> None:
    """Refuses arguments that :func:`polar_express` is not defined for.

    Raises:
        ValueError: saying which one and what it should be.
    """
    if m_NRC.dim() != 3 or 0 in m_NRC.shape[1:]:
        raise ValueError(f"Polar Express takes matrices [N, R, C] of at least one element, got {list(m_NRC.shape)}")
    if m_NRC.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Polar Express takes float32 or float64 matrices, got {m_NRC.dtype}")
    if dtype not in DTYPES or (dtype is torch.float64 and m_NRC.dtype is not torch.float64):
        raise ValueError(f"Polar Express of {m_NRC.dtype} matrices cannot compute in {dtype}")


def _iterate(m_NLK: Tensor, rows: Sequence[Row], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[N, L, K], L <= K: the result in the dtype it was computed with, and the largest entries."""
    x_NLK = _rounded(_stored(_normalised(m_NLK), dtype), dtype)
    largest_N = _largest(x_NLK)
    for a, b, c in rows:
        gram_NLL = _rounded(torch.bmm(x_NLK, x_NLK.mT), dtype)
        b_NLL = _rounded(torch.baddbmm(gram_NLL, gram_NLL, gram_NLL, beta=b, alpha=c), dtype)
        x_NLK = _rounded(torch.baddbmm(x_NLK, b_NLL, x_NLK, beta=a), dtype)
        for t in (gram_NLL, b_NLL, x_NLK):
            largest_N = torch.maximum(largest_N, _largest(t))
    return x_NLK, largest_N.float()


def _normalised(m_NLK: Tensor) -> Tensor:
    """M / (1.01 ||M||_F + 1e-7), with a norm summed in float64; all NaN for a matrix that is not finite."""
    largest_N11 = torch.linalg.vector_norm(m_NLK, math.inf, dim=(1, 2), keepdim=True)
    # Large matrices are first scaled by a power of two, which rounds nothing: neither norm nor quotient overflows.
    exponent_N11 = torch.frexp(largest_N11).exponent.clamp(0, math.frexp(torch.finfo(m_NLK.dtype).max)[1] - 8)
    scale_N11 = torch.ldexp(torch.ones_like(largest_N11), -exponent_N11)
    scaled_NLK = m_NLK * scale_N11
    norm_N11 = torch.linalg.vector_norm(scaled_NLK, dim=(1, 2), keepdim=True, dtype=torch.float64)
    divisor_N11 = (1.01 * norm_N11 + 1e-7 * scale_N11).to(m_NLK.dtype)
    return scaled_NLK / divisor_N11.masked_fill(~largest_N11.isfinite(), math.nan)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As the tensor that matrix products are taken of."""
    return x.float() if x.device.type == "cpu" and dtype.itemsize == 2 else x.to(dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of ``dtype``, in the tensor's own dtype."""
    return x.to(dtype).to(x.dtype)


def _largest(x_NRC: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x_NRC, math.inf, dim=(1, 2))
