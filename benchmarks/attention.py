"""Attention and norm against torch's own, forward and backward, fp32 on two CPU threads.

Sizes of one layer of the benchmark model in ``benchmarks.train_step``. Ratios are torch's median
time over ours; the contenders take turns.

    python -m benchmarks.attention
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import interleave, median, print_result, print_table
from steptron.model.norm import ZeroCentredRMSNorm
from steptron_kernels.attention.plain import attention, visible_keys

THREADS = 2
SEQUENCE, BATCH, HIDDEN, HEADS, GROUPS, HEAD_DIM, WINDOW = 512, 4, 256, 12, 2, 32, 64
TARGETS = {"sliding": 2.0, "full": 1.2, "norm": 2.0}


def forward_and_backward(function: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], None]:
    d_output = torch.randn_like(function(*leaves))

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward(d_output)

    return run


def sdpa(q_SBnD: Tensor, k_SBgD: Tensor, v_SBgD: Tensor, mask_SS: Tensor | None) -> Tensor:
    """torch's fused attention: causal without a mask."""
    q_BnSD, k_BgSD, v_BgSD = (x.permute(1, 2, 0, 3) for x in (q_SBnD, k_SBgD, v_SBgD))
    causal = mask_SS is None
    o_BnSD = F.scaled_dot_product_attention(
        q_BnSD, k_BgSD, v_BgSD, attn_mask=mask_SS, is_causal=causal, enable_gqa=True
    )
    return o_BnSD.permute(2, 0, 1, 3)


def contenders() -> dict[str, Callable[[], None]]:
    shapes = [(SEQUENCE, BATCH, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
    mask_SS = visible_keys(SEQUENCE, SEQUENCE, WINDOW)[0]
    norm = ZeroCentredRMSNorm(HIDDEN, 1e-5)
    x_SBH = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)
    return {
        "sliding, torch": forward_and_backward(lambda q, k, v: sdpa(q, k, v, mask_SS), qkv),
        "sliding, ours": forward_and_backward(lambda q, k, v: attention(q, k, v, window=WINDOW), qkv),
        "full, torch": forward_and_backward(lambda q, k, v: sdpa(q, k, v, None), qkv),
        "full, ours": forward_and_backward(lambda q, k, v: attention(q, k, v, window=None), qkv),
        "norm, torch": forward_and_backward(
            lambda x: F.rms_norm(x, (HIDDEN,), 1.0 + norm.weight, eps=norm.eps), [x_SBH]
        ),
        "norm, ours": forward_and_backward(norm, [x_SBH]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(THREADS)
    medians = {name: median(times) for name, times in interleave(contenders(), rounds, warmup=5).items()}
    print_table(
        f"forward and backward, fp32, {THREADS} threads, median of {rounds}",
        ["", "ms"],
        [[name, f"{1e3 * seconds:.2f}"] for name, seconds in medians.items()],
    )
    ratios = {key: medians[f"{key}, torch"] / medians[f"{key}, ours"] for key in TARGETS}
    print_result("attention", ratios, TARGETS)


if __name__ == "__main__":
    main()
