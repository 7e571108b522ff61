"""Polar Express in C++, float32 matrices on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.polar_express.coefficients import Row
from steptron_kernels.polar_express.plain import check


def polar_express(m_NRC: Tensor, rows: Sequence[Row], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As :func:`steptron_kernels.polar_express.plain.polar_express`, for float32.

    A matrix's results depend neither on the others in the batch nor on the number of threads.

    Raises:
        ValueError: as there, and for matrices that are not float32.
    """
    check(m_NRC, dtype)
    if m_NRC.dtype is not torch.float32:
        raise ValueError(f"the native Polar Express takes float32 matrices, got {m_NRC.dtype}")
    coefficients = [value for row in rows for value in row]
    # Without the instructions, bfloat16 values in float32 products are faster than emulation.
    in_bf16 = extension.has_fast_bf16()
    o_NRC, largest_N = torch.ops.steptron_kernels.polar_express(m_NRC, coefficients, dtype, in_bf16)
    return o_NRC, largest_N
