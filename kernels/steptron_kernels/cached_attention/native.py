"""Attention to cached keys and values in C++, float32."""

from __future__ import annotations

import torch
from torch import Tensor

from steptron_kernels.packed_weights import Products

_ALL = 2**62


class CachedAttention:
    """As :func:`steptron_kernels.cached_attention.plain.cached_attention`, for float32; copies no keys or values.

    Args:
        products: what the operands of the matrix products are rounded to; scores, softmax and sums are float32.
    """

    def __init__(self, products: Products) -> None:
        self._in_bf16 = products == "bf16"

    def __call__(
        self,
        q_RQnD: Tensor,
        k_NgD: Tensor,
        v_NgD: Tensor,
        table_RL: Tensor,
        first_R: Tensor,
        places_RQ: Tensor,
        window: int | None,
        sink_n: Tensor | None = None,
    ) -> Tensor:
        output: Tensor = torch.ops.steptron_kernels.cached_attention(
            q_RQnD.contiguous(),
            k_NgD,
            v_NgD,
            table_RL,
            first_R,
            places_RQ,
            _ALL if window is None else window,
            None if sink_n is None else sink_n.contiguous(),
            self._in_bf16,
        )
        return output
