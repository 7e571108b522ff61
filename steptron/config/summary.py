"""A run in a few lines."""

from __future__ import annotations

from steptron.config.checks import data_parallel_size
from steptron.config.schema import ParallelConfig, PretrainConfig
from steptron.config.stages import Curriculum, Stage


def summary(config: PretrainConfig, processes: int) -> list[str]:
    """Model, layout, batch and training of a checked configuration, a line each."""
    model, parallel, train = config.model, config.parallel, config.train
    ranks = data_parallel_size(parallel, processes)
    micro_batches = train.micro_batches(ranks)
    ramp = f" (from {train.batch_ramp.start:,})" if train.batch_ramp is not None else ""
    return [
        f"model     {model.num_layers} layers, {model.mtp.depths} MTP, hidden {model.hidden_size}, "
        f"{model.moe.num_experts} experts top {model.moe.top_k}, {model.layout}",
        f"parallel  {_dense_layout(parallel, ranks)}; experts over {parallel.expert}",
        f"batch     {train.global_batch_size:,} sequences{ramp} of {config.data.sequence_length:,} tokens: "
        f"{micro_batches} x {train.micro_batch_size} per rank",
        f"training  {train.steps:,} steps, {config.optimizer.name}, {train.precision}",
    ]


def describe_stage(stage: Stage, curriculum: Curriculum) -> str:
    """Which stage of how many, and where in the run it lies."""
    return (
        f"{stage.name} ({stage.number + 1} of {len(curriculum.stages)}): steps {stage.first_step + 1:,} to "
        f"{stage.last_step:,}, {stage.consumed_tokens:,} tokens from token {stage.first_token:,} on"
    )


def _dense_layout(parallel: ParallelConfig, data_ranks: int) -> str:
    """The dimensions that attention and dense layers are laid over; pipeline and data always named."""
    chunks = f" of {parallel.virtual_pipeline} chunks" if parallel.virtual_pipeline > 1 else ""
    parts = [f"pipeline {parallel.pipeline}{chunks}"]
    parts += [f"{name} {getattr(parallel, name)}" for name in ("tensor", "context") if getattr(parallel, name) > 1]
    return " x ".join([*parts, f"data {data_ranks}"])
