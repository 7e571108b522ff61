"""Which version of each operation a model uses: chosen once, from the device, the dtype and the configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.add_rms_norm import plain as plain_add_rms_norm
from steptron_kernels.attention import plain as plain_attention
from steptron_kernels.cached_attention import plain as plain_cached_attention
from steptron_kernels.experts import plain as plain_experts
from steptron_kernels.experts.plan import RowPlan
from steptron_kernels.head_gate import plain as plain_head_gate
from steptron_kernels.linear import plain as plain_linear
from steptron_kernels.linear_cross_entropy import plain as plain_linear_cross_entropy
from steptron_kernels.packed_weights import PackedWeights, Products
from steptron_kernels.qk_norm_rope import plain as plain_qk_norm_rope
from steptron_kernels.rms_norm import plain as plain_rms_norm
from steptron_kernels.route import plain as plain_route
from steptron_kernels.swiglu import plain as plain_swiglu

Choice = Literal["auto", "native", "plain"]
ProductsChoice = Literal["auto", "fp32", "bf16"]


class KernelsUnavailableError(Exception):
    """The configuration asks for operations that this machine, device or dtype does not have."""


@dataclass(frozen=True)
class Kernels:
    """One version of every operation; the plain versions' docstrings define them.

    Attributes:
        name: which versions.
        products: what the operands of matrix products on float32 tensors are rounded to; sums are float32.
    """

    name: Literal["native", "plain"]
    products: Products
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    attention: Callable[..., Tensor]
    cached_attention: Callable[..., Tensor]
    head_gate: Callable[[Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, float | None, bool], Tensor]
    linear: Callable[[Tensor, Tensor], Tensor]
    route: Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor, Tensor]]
    row_plan: Callable[[Tensor, int], tuple[RowPlan, Tensor]]
    experts: Callable[..., Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


PLAIN = Kernels(
    name="plain",
    products="fp32",
    rms_norm=plain_rms_norm.rms_norm,
    add_rms_norm=plain_add_rms_norm.add_rms_norm,
    qk_norm_rope=plain_qk_norm_rope.qk_norm_rope,
    attention=plain_attention.attention,
    cached_attention=plain_cached_attention.cached_attention,
    head_gate=plain_head_gate.head_gate,
    swiglu=plain_swiglu.swiglu,
    linear=plain_linear.linear,
    route=plain_route.route,
    row_plan=plain_experts.row_plan,
    experts=plain_experts.experts,
    linear_cross_entropy=plain_linear_cross_entropy.linear_cross_entropy,
)


def native(products: Products) -> Kernels:
    """The native CPU versions, for the float32 tensors of one model (they keep its packed weights).

    Raises:
        NativeUnavailableError: they are not built for this machine.
    """
    extension.require()
    from steptron_kernels.add_rms_norm import native as native_add_rms_norm
    from steptron_kernels.attention import native as native_attention
    from steptron_kernels.cached_attention import native as native_cached_attention
    from steptron_kernels.experts import native as native_experts
    from steptron_kernels.head_gate import native as native_head_gate
    from steptron_kernels.linear import native as native_linear
    from steptron_kernels.linear_cross_entropy import native as native_linear_cross_entropy
    from steptron_kernels.qk_norm_rope import native as native_qk_norm_rope
    from steptron_kernels.rms_norm import native as native_rms_norm
    from steptron_kernels.route import native as native_route
    from steptron_kernels.swiglu import native as native_swiglu

    packed = PackedWeights(products)
    return Kernels(
        name="native",
        products=products,
        rms_norm=native_rms_norm.rms_norm,
        add_rms_norm=native_add_rms_norm.add_rms_norm,
        qk_norm_rope=native_qk_norm_rope.qk_norm_rope,
        attention=native_attention.Attention(products),
        cached_attention=native_cached_attention.CachedAttention(products),
        head_gate=native_head_gate.head_gate,
        swiglu=native_swiglu.swiglu,
        linear=native_linear.Linear(packed),
        route=native_route.route,
        row_plan=native_experts.row_plan,
        experts=native_experts.Experts(packed),
        linear_cross_entropy=native_linear_cross_entropy.LinearCrossEntropy(packed),
    )


def select(choice: Choice, products: ProductsChoice, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Chooses the operations of a model.

    Args:
        choice: native or plain; auto takes native where it can be used.
        products: operands of matrix products on float32 tensors; auto takes bf16 where it is faster.
        device: where the model lives.
        dtype: dtype of its parameters and residual stream.

    Raises:
        KernelsUnavailableError: what is asked for explicitly is not to be had; the message says why.
    """
    reason = _why_not_native(device, dtype)
    if choice == "native" and reason is not None:
        raise KernelsUnavailableError(f"native kernels: {reason}")
    use_native = choice != "plain" and reason is None
    if products == "bf16":
        if not use_native:
            why = reason if reason is not None else "plain kernels were asked for"
            raise KernelsUnavailableError(f"bf16 products need the native kernels: {why}")
        if not extension.has_fast_bf16():
            raise KernelsUnavailableError("bf16 products need a processor with AVX512-BF16 or AMX: use fp32 or auto")
    if not use_native:
        return PLAIN
    in_bf16 = products == "bf16" or (products == "auto" and extension.has_fast_bf16())
    return native("bf16" if in_bf16 else "fp32")


def _why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"they run on the CPU, the model is on {device.type}"
    if dtype is not torch.float32:
        return f"they compute in float32, the model is {str(dtype).removeprefix('torch.')}"
    return extension.why_unavailable()
