"""Each operation, native against plain, forward and backward, fp32 on two CPU threads.

Sizes of one layer of the benchmark model in ``benchmarks.train_step``. A ratio is the plain version's
median time over the native one's with fp32 products; attention and norm also stand beside torch's own
fused versions. The contenders take turns.

    python -m benchmarks.operations
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from steptron.platform import malloc, threads

os.environ.update(threads.default_environment())  # read when torch is imported

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import interleave, median, print_result, print_table
from steptron_kernels.attention.plain import visible_keys
from steptron_kernels.extension import has_fast_bf16
from steptron_kernels.select import PLAIN, Kernels, native

THREADS = 2
SEQUENCE, BATCH, HIDDEN, HEADS, GROUPS, HEAD_DIM, WINDOW = 512, 4, 256, 12, 2, 32, 64
EXPERTS, TOP_K, EXPERT, DENSE, VOCABULARY = 32, 4, 80, 704, 4096
TOKENS = SEQUENCE * BATCH

Call = Callable[[], Tensor]


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).requires_grad_()


def operations(kernels: Kernels) -> dict[str, tuple[Call, list[Tensor]]]:
    """A call of each operation, and the tensors that get gradients."""
    q, k, v = (normal(SEQUENCE, BATCH, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS))
    x, delta, norm = normal(SEQUENCE, BATCH, HIDDEN), normal(SEQUENCE, BATCH, HIDDEN), normal(HIDDEN, scale=0.1)
    projected = normal(SEQUENCE, BATCH, (HEADS + 2 * GROUPS) * HEAD_DIM + HEADS)
    head_norms = [normal(HEAD_DIM, scale=0.1), normal(HEAD_DIM, scale=0.1)]
    angles = torch.rand(SEQUENCE, BATCH, 1, HEAD_DIM // 2)
    gate, gate_up = normal(SEQUENCE, BATCH, HEADS), normal(SEQUENCE, BATCH, 2 * DENSE)
    tokens, weight = normal(TOKENS, HIDDEN), normal(2 * DENSE, HIDDEN, scale=0.05)
    router, head = normal(EXPERTS, HIDDEN, scale=0.05), normal(VOCABULARY, HIDDEN, scale=0.05)
    expert_weights = [normal(EXPERTS, 2 * EXPERT, HIDDEN, scale=0.05), normal(EXPERTS, HIDDEN, EXPERT, scale=0.1)]
    routing = torch.rand(TOKENS, TOP_K).requires_grad_()
    plan, counts = kernels.row_plan(torch.rand(TOKENS, EXPERTS).argsort(dim=1)[:, :TOP_K].contiguous(), EXPERTS)
    labels, mask = torch.randint(0, VOCABULARY, (TOKENS,)), torch.ones(TOKENS, dtype=torch.bool)
    bias = torch.zeros(EXPERTS)

    def rotated() -> Tensor:
        parts = kernels.qk_norm_rope(projected, *head_norms, angles.cos(), angles.sin(), HEADS, GROUPS, 1e-5, True)
        return torch.cat([part.flatten() for part in parts if part is not None])

    return {
        "attention, sliding": (lambda: kernels.attention(q, k, v, window=WINDOW), [q, k, v]),
        "attention, full": (lambda: kernels.attention(q, k, v, window=None), [q, k, v]),
        "rms_norm": (lambda: kernels.rms_norm(x, norm, 1e-5), [x, norm]),
        "add_rms_norm": (lambda: kernels.add_rms_norm(x, delta, norm, 1e-5)[1], [x, delta, norm]),
        "qk_norm_rope": (rotated, [projected, *head_norms]),
        "head_gate": (lambda: kernels.head_gate(q, gate), [q, gate]),
        "swiglu": (lambda: kernels.swiglu(gate_up, None, True), [gate_up]),
        "linear": (lambda: kernels.linear(tokens, weight), [tokens, weight]),
        "route": (lambda: kernels.route(tokens, router, bias, TOP_K, 3.0)[1], [tokens, router]),
        "experts": (
            lambda: kernels.experts(tokens, *expert_weights, counts, routing, plan, None, True),
            [tokens, *expert_weights, routing],
        ),
        "linear_cross_entropy": (lambda: kernels.linear_cross_entropy(tokens, head, labels, mask), [tokens, head]),
    }


def torch_operations() -> dict[str, tuple[Call, list[Tensor]]]:
    """torch's own fused attention and norm."""
    q, k, v = (normal(SEQUENCE, BATCH, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS))
    mask_SS = visible_keys(SEQUENCE, SEQUENCE, WINDOW)[0]
    x, norm = normal(SEQUENCE, BATCH, HIDDEN), normal(HIDDEN, scale=0.1)

    def sdpa(mask: Tensor | None) -> Tensor:
        queries, keys, values = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        o_BnSD = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return o_BnSD.permute(2, 0, 1, 3)

    return {
        "attention, sliding": (lambda: sdpa(mask_SS), [q, k, v]),
        "attention, full": (lambda: sdpa(None), [q, k, v]),
        "rms_norm": (lambda: F.rms_norm(x, (HIDDEN,), 1.0 + norm, eps=1e-5), [x, norm]),
    }


def forward_and_backward(call: Call, leaves: list[Tensor]) -> Callable[[], None]:
    d_output = torch.randn_like(call())

    def run() -> None:
        torch.autograd.grad(call(), leaves, d_output)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    malloc.keep_freed_memory()
    torch.set_num_threads(THREADS)
    versions = {"torch": torch_operations(), "plain": operations(PLAIN), "native": operations(native("fp32"))}
    if has_fast_bf16():
        versions["native, bf16"] = operations(native("bf16"))
    contenders = {
        (name, version): forward_and_backward(*called)
        for version, calls in versions.items()
        for name, called in calls.items()
    }
    keyed = interleave({f"{name}/{version}": run for (name, version), run in contenders.items()}, rounds, warmup=5)
    medians = {key: median(keyed["/".join(key)]) for key in contenders}
    names = list(versions["plain"])
    rows = [
        [name, *(f"{1e3 * medians[name, version]:.2f}" if (name, version) in medians else "" for version in versions)]
        for name in names
    ]
    title = f"Forward and backward, ms, {THREADS} threads, median of {rounds}"
    print_table(title, ["operation", *versions], rows)
    print_result("operations", {name: medians[name, "plain"] / medians[name, "native"] for name in names}, {})


if __name__ == "__main__":
    main()
