"""Completing the gradients of a step, after the last backward pass."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from steptron.parallel.gradient_buffer import DataParallel


def finalize_gradients(
    model: list[DataParallel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Finishes data-parallel reductions and adds up the gradients of the replicated embedding.

    Called by Megatron-Core's schedules, whose signature it has. ``num_tokens`` is not used: losses
    were divided by global counts beforehand.

    The embedding exists twice when MTP runs on a last stage that is not the first: its gradient is
    the sum over both stages.
    """
    for chunk in model:
        chunk.finish_grad_sync()
    assert pg_collection is not None
    for chunk in model:
        module = chunk.module
        one_stage = module.stage.is_first and module.stage.is_last
        if module.mtp_depths > 0 and not one_stage and hasattr(module, "embedding"):
            dist.all_reduce(module.embedding.weight.main_grad, group=pg_collection.embd)
