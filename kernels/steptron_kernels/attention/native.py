"""Causal and sliding-window attention in C++, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from steptron_kernels.attention.plain import check_shapes
from steptron_kernels.packed_weights import Products


class Attention:
    """As :func:`steptron_kernels.attention.plain.attention`, for float32 tensors.

    Args:
        products: what the operands of the matrix products are rounded to; scores, softmax and sums are float32.
    """

    def __init__(self, products: Products) -> None:
        self._in_bf16 = products == "bf16"

    def __call__(
        self,
        q_SBnD: Tensor,
        k_TBgD: Tensor,
        v_TBgD: Tensor,
        *,
        window: int | None,
        sink_n: Tensor | None = None,
        documents_BT: Tensor | None = None,
        query_offset: int = 0,
        first_keys: list[int] | None = None,
    ) -> Tensor:
        """``first_keys`` is not needed: which keys a block of queries can see is found from the documents."""
        check_shapes(q_SBnD, k_TBgD, v_TBgD, window, sink_n, documents_BT, query_offset)
        documents = None if documents_BT is None else documents_BT.to(torch.int64).contiguous()
        visible = len(k_TBgD) if window is None else min(window, len(k_TBgD))
        output: Tensor = _Attention.apply(
            _readable(q_SBnD),
            _readable(k_TBgD),
            _readable(v_TBgD),
            sink_n,
            documents,
            (visible, query_offset, self._in_bf16),
        )
        return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx: Any, q, k, v, sink, documents, options: tuple[int, int, bool]
    ) -> Tensor:
        sink = None if sink is None else sink.contiguous()
        output: Tensor
        output, shift, inverse = torch.ops.steptron_kernels.attention(q, k, v, sink, documents, *options)
        ctx.save_for_backward(q, k, v, output, shift, inverse, sink, documents)
        ctx.options = options
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        d_q, d_k, d_v, d_sink = torch.ops.steptron_kernels.attention_backward(_readable(d_output), *saved, *ctx.options)
        return d_q, d_k, d_v, None if saved[6] is None else d_sink, None, None


def _readable(x: Tensor) -> Tensor:
    """The tensor itself where the elements of its last dimension stand side by side, as the C++ reads them."""
    return x if x.stride(-1) == 1 else x.contiguous()
