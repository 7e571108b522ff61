"""Training step (forward, backward, clipping, AdamW) against transformers' Step-3.7 text model.

All train the same architecture at the same size on the same tokens, in one process on two threads,
taking turns. transformers runs in fp32 with its fastest attention and expert implementation (tried
first) and torch's fused AdamW. We run with fp32 products (`fp32`), with bfloat16 operands of the
products where the processor has them (`bf16`), and with plain torch operations. A ratio is
transformers' median step time over ours. A second table says where the time of a step goes.

    python -m benchmarks.train_step
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from steptron.platform import malloc, threads

os.environ.update(threads.default_environment())  # read when torch is imported

import torch
import torch.nn.functional as F

from benchmarks.harness import interleave, median, print_result, print_table
from steptron.profiling.breakdown import Breakdown, breakdown
from steptron.profiling.categories import Category
from steptron_kernels.extension import has_fast_bf16

if TYPE_CHECKING:
    from steptron.parallel.mesh import Mesh

THREADS = 2
BATCH, SEQUENCE, VOCABULARY, HIDDEN, LAYERS = 4, 512, 4096, 256, 8
HEAD_DIM, FULL_HEADS, SLIDING_HEADS, GROUPS, WINDOW = 32, 8, 12, 2, 64
DENSE, EXPERT, SHARED, EXPERTS, TOP_K = 704, 80, 80, 32, 4
LEARNING_RATE = 1e-3
TARGETS = {"fp32": 2.0, "bf16": 3.0}

Variant = tuple[str, str | None]
"""Attention and expert implementation of transformers."""


def tokens() -> torch.Tensor:
    """int64 [B, S + 1]"""
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))


@functools.cache
def single_process() -> Mesh:
    """Process groups of this process alone, for all our contenders."""
    from steptron.config.schema import ParallelConfig
    from steptron.parallel.mesh import build_mesh
    from steptron.platform import distributed

    distributed.initialize(torch.device("cpu"), timeout_seconds=60)
    return build_mesh(ParallelConfig())


def steptron_step(kernels: str = "native", products: str = "fp32") -> Callable[[], float]:
    """Our step, as `steptron pretrain` runs it."""
    from steptron.config.schema import PretrainConfig
    from steptron.data.batch import MicroBatch
    from steptron.train.step import TrainStep

    config = PretrainConfig.model_validate(
        {
            "model": {
                "vocab_size": VOCABULARY,
                "hidden_size": HIDDEN,
                "num_layers": LAYERS,
                "num_dense_layers": 1,
                "head_dim": HEAD_DIM,
                "dense_hidden_size": DENSE,
                "full": {
                    "num_heads": FULL_HEADS,
                    "num_kv_groups": GROUPS,
                    "rope": {"theta": 5e6, "rotary_fraction": 0.5},
                },
                "sliding": {
                    "num_heads": SLIDING_HEADS,
                    "num_kv_groups": GROUPS,
                    "window": WINDOW,
                    "rope": {"theta": 1e4},
                },
                "moe": {
                    "num_experts": EXPERTS,
                    "top_k": TOP_K,
                    "expert_hidden_size": EXPERT,
                    "shared_hidden_size": SHARED,
                },
            },
            "loss": {"mtp_train_depths": 0},
            "data": {"train": [{"path": "unused"}], "sequence_length": SEQUENCE},
            "optimizer": {"lr": LEARNING_RATE},
            "train": {
                "output": "unused",
                "steps": 1,
                "global_batch_size": BATCH,
                "micro_batch_size": BATCH,
                "kernels": kernels,
                "products": products,
            },
        }
    )
    step = TrainStep(config, single_process(), torch.device("cpu"))
    ids = tokens()
    batch = MicroBatch(
        tokens_BS=ids[:, :-1].contiguous(),
        labels_BS=ids[:, 1:].contiguous(),
        loss_mask_BS=torch.ones(BATCH, SEQUENCE, dtype=torch.bool),
        positions_BS=torch.arange(SEQUENCE).expand(BATCH, SEQUENCE),
        documents_BS=torch.zeros(BATCH, SEQUENCE, dtype=torch.int64),
    )
    return lambda: step.run([batch], LEARNING_RATE, 1e-3).observed.losses.lm


def transformers_step(attention: str = "sdpa", experts: str | None = None) -> Callable[[], float]:
    """The same step with transformers' model, a linear head and torch's fused AdamW."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    full = [i % 4 == 0 for i in range(LAYERS)]
    config = Step3p7TextConfig(
        hidden_size=HIDDEN,
        intermediate_size=DENSE,
        num_hidden_layers=LAYERS,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * SEQUENCE,
        num_attention_heads=FULL_HEADS,
        num_attention_groups=GROUPS,
        head_dim=HEAD_DIM,
        sliding_window=WINDOW,
        attention_other_setting={
            "attention_type": "sliding_attention",
            "num_attention_heads": SLIDING_HEADS,
            "num_attention_groups": GROUPS,
            "head_dim": HEAD_DIM,
            "true_head_dim": HEAD_DIM,
        },
        layer_types=["full_attention" if f else "sliding_attention" for f in full],
        rope_theta=[5e6 if f else 1e4 for f in full],
        partial_rotary_factors=[0.5 if f else 1.0 for f in full],
        rope_scaling={
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": SEQUENCE,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
        yarn_only_types=["full_attention"],
        moe_layers_enum=",".join(str(i) for i in range(1, LAYERS)),
        use_moe=True,
        moe_num_experts=EXPERTS,
        moe_top_k=TOP_K,
        moe_intermediate_size=EXPERT,
        share_expert_dim=SHARED,
        moe_router_scaling_factor=3.0,
        moe_router_activation="sigmoid",
        use_moe_router_bias=True,
        need_fp32_gate=True,
        norm_expert_weight=True,
        use_head_wise_attn_gate=True,
        use_qk_norm=True,
        swiglu_limits=[0.0] * LAYERS,
        swiglu_limits_shared=[0.0] * LAYERS,
        tie_word_embeddings=False,
    )
    config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    torch.manual_seed(0)
    model = Step3p7TextModel(config).train()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    parameters = [*model.parameters(), *head.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0.0, 0.02)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.zero_()
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = tokens()

    def step() -> float:
        hidden = model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        loss = F.cross_entropy(head(hidden).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def fastest_transformers() -> tuple[Variant, Callable[[], float]]:
    """Tries transformers' attention and expert implementations and keeps the fastest."""
    fastest: dict[Variant, float] = {}
    for variant in itertools.product(("sdpa", "eager"), (None, "grouped_mm", "batched_mm")):
        try:
            step = transformers_step(*variant)
            seconds = interleave({"step": step}, rounds=3, warmup=1)["step"]
        except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            print(f"transformers ({_name(*variant)}) does not run: {str(error).splitlines()[0][:100]}")
            continue
        fastest[variant] = min(seconds)
        print(f"transformers ({_name(*variant)}): {fastest[variant]:.3f} s per step")
    best = min(fastest, key=fastest.__getitem__)
    return best, transformers_step(*best)


def _name(attention: str, experts: str | None) -> str:
    return f"{attention}, {experts or 'default'} experts"


def peak_memory(make: Callable[[], Callable[[], float]]) -> int:
    """Peak resident bytes of a fresh process that takes three steps."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_measure_memory, args=(make, queue))
    process.start()
    process.join(timeout=300)
    if process.exitcode != 0:
        raise RuntimeError(f"measuring the memory of {make} ended with exit code {process.exitcode}")
    return int(queue.get())


def _measure_memory(make: Callable[[], Callable[[], float]], queue: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    as_a_training_process()
    step = make()
    for _ in range(3):
        step()
    # Not getrusage's figure, which a new process takes over from the one that started it.
    status = Path("/proc/self/status").read_text()
    queue.put(int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024)


def shares(step: Callable[[], float], steps: int = 5) -> Breakdown:
    """Where the time of a contender's step goes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = time.perf_counter() - start
    return breakdown(profiler, seconds)


def as_a_training_process() -> None:
    """The settings that `steptron pretrain` starts its processes with; every contender has them."""
    malloc.keep_freed_memory()
    torch.set_num_threads(THREADS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each contender")
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore")
    as_a_training_process()
    makers: dict[str, Callable[[], Callable[[], float]]] = {"fp32": steptron_step}
    if has_fast_bf16():
        makers["bf16"] = partial(steptron_step, products="bf16")
    else:
        print("this processor has neither AVX512-BF16 nor AMX: bf16 products are left out")
    makers["plain"] = partial(steptron_step, kernels="plain")
    contenders = {name: make() for name, make in makers.items()}
    best, contenders["transformers"] = fastest_transformers()
    makers["transformers"] = partial(transformers_step, *best)
    seconds = interleave(contenders, rounds)
    memory = {name: peak_memory(make) for name, make in makers.items()}
    labels = {
        "fp32": "steptron, fp32 products",
        "bf16": "steptron, bf16 products",
        "plain": "steptron, plain torch operations",
        "transformers": f"transformers ({_name(*best)})",
    }
    reference = median(seconds["transformers"])
    rows = [
        [
            labels[name],
            f"{median(values):.3f}",
            f"{min(values):.3f}",
            f"{BATCH * SEQUENCE / median(values):,.0f}",
            f"{reference / median(values):.2f}",
            f"{memory[name] / 2**20:,.0f}",
        ]
        for name, values in seconds.items()
    ]
    columns = ["contender", "median s/step", "fastest", "tokens/s", "ratio", "peak memory, MiB"]
    print_table(f"Training step, {THREADS} threads, {rounds} rounds", columns, rows)
    found = {name: shares(step) for name, step in contenders.items()}
    print_table(
        "Share of the step's time, %",
        ["category", *found],
        [[category.value, *(f"{100 * one.share(category):.1f}" for one in found.values())] for category in Category],
    )
    ratios = {name: reference / median(seconds[name]) for name in ("fp32", "bf16") if name in seconds}
    print_result("train_step", ratios, {name: TARGETS[name] for name in ratios})


if __name__ == "__main__":
    main()
