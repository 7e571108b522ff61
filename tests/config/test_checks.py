from __future__ import annotations

import os
import types
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steptron.config import checks
from steptron.config.checks import check, check_stages, smallest_world_size
from steptron.config.loader import load
from steptron.config.schema import ParallelConfig, PretrainConfig
from steptron.config.stages import Curriculum, Stage
from steptron.errors import ConfigError
from tests.config.samples import MINIMAL, write


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*overrides: str) -> PretrainConfig:
    return load(write(Path(), "run.yaml", MINIMAL), overrides).config


def problems(*overrides: str, world_size: int = 1, check_data: bool = False) -> tuple[str, ...]:
    """Problems of the sample (5 layers, the first dense; 8 experts top 2; batch 4 = 2 x 2) after overrides."""
    with pytest.raises(ConfigError) as caught:
        check(config(*overrides), world_size, "cpu", check_data=check_data)
    return caught.value.problems


ALL_DENSE = "model.num_dense_layers=5"
HIDDEN = (
    "query, key, value, head_gate, attention_output, ffn_gate, ffn_up, ffn_down, router, expert_gate, expert_up, "
    "expert_down, shared_gate, shared_up, shared_down, mtp_projection"
)
ROLES = f"embedding, head, norm, sink, {HIDDEN}, value_head"
STAGED = "optimizer.schedule={kind: staged, warmup_steps: 2, segments: [{steps: 7, end_lr: 1e-4}]}"

# Overrides, number of processes, the one problem.
REFUSED = [
    # ------------------------------------------------------------------------------------- model
    (
        ["model.layout=S3"],
        1,
        "model.layout: layout 'S3' is not understood: expected FFFF, S1F1 or S3F1 (any S<n>F<m>), "
        "followed by any of +heads, +gate, +sink",
    ),
    (["model.layout=S99999F1"], 1, "model.layout: layout 'S99999F1' has a count above 9999"),
    (["model.layout=S3F1+gate+gate"], 1, "model.layout: layout 'S3F1+gate+gate' names an option twice"),
    (
        ["model.layout=S0F1"],
        1,
        "model.layout: layout 'S0F1': counts must be at least 1 (use FFFF for full attention everywhere)",
    ),
    (
        ["model.layout=FFFF+heads"],
        1,
        "model.layout (FFFF+heads) asks for +heads, but the model has no sliding layer: "
        "drop +heads, or take S1F1 or S3F1 (or model.mtp.depths above 0, whose layers slide)",
    ),
    (
        ["model.full.num_heads=5"],
        1,
        "model.full.num_heads (5) must be a multiple of model.full.num_kv_groups (2)",
    ),
    (
        ["model.sliding.num_heads=7"],
        1,
        "model.sliding.num_heads (7) must be a multiple of model.sliding.num_kv_groups (2)",
    ),
    (
        ["model.layout=S3F1+gate", "model.sliding.num_kv_groups=3"],
        1,
        "model.full.num_heads (4) must be a multiple of model.sliding.num_kv_groups (3) "
        "(without +heads in model.layout, sliding layers take it too)",
    ),
    (
        ["model.full.rope.rotary_fraction=0.3125"],
        1,
        "model.full.rope.rotary_fraction (0.3125) x model.head_dim (16) gives 5 rotated dimensions: "
        "it must be a positive even number",
    ),
    (
        ["model.sliding.rope.rotary_fraction=0.4"],
        1,
        "model.sliding.rope.rotary_fraction (0.4) x model.head_dim (16) gives 6.4 rotated dimensions: "
        "it must be a positive even number",
    ),
    (
        ["model.full.rope.rotary_fraction=1e-9"],
        1,
        "model.full.rope.rotary_fraction (1e-09) x model.head_dim (16) gives 1.6e-08 rotated dimensions: "
        "it must be a positive even number",
    ),
    (
        ["model.full.rope.scaling={factor: 2, original_length: 64, low_freq_factor: 4, high_freq_factor: 4}"],
        1,
        "model.full.rope.scaling.low_freq_factor (4.0) must be less than high_freq_factor (4.0)",
    ),
    (
        ["model.num_dense_layers=6"],
        1,
        "model.num_dense_layers (6) must not exceed model.num_layers (5)",
    ),
    (
        ["model.clamp.routed={5: 7}"],
        1,
        "model.clamp.routed names layer 5, but model.num_layers is 5: layers are numbered 0 to 4",
    ),
    (
        ["model.clamp.shared={-1: 7}"],
        1,
        "model.clamp.shared names layer -1, but model.num_layers is 5: layers are numbered 0 to 4",
    ),
    (
        ["model.clamp.routed={0: 7}"],
        1,
        "model.clamp.routed names layer 0, which is dense (model.num_dense_layers is 1) and has no routed experts: "
        "MoE layers are 1 to 4; limits of dense layers stand in model.clamp.shared",
    ),
    (
        ["model.clamp.routed={4: 7}", ALL_DENSE],
        1,
        "model.clamp.routed names layer 4, which is dense (model.num_dense_layers is 5) and has no routed experts: "
        "MoE layers are none; limits of dense layers stand in model.clamp.shared",
    ),
    # ----------------------------------------------------------------------------------- experts
    (["model.moe.top_k=9"], 1, "model.moe.top_k (9) must not exceed model.moe.num_experts (8)"),
    (
        ["parallel.expert=3", "train.global_batch_size=6"],
        3,
        "model.moe.num_experts (8) must be a multiple of parallel.expert (3): parallel.expert can be 1, 2, 4, 8",
    ),
    (
        ["parallel.expert=2", ALL_DENSE],
        2,
        "parallel.expert is 2, but the model has no MoE layer (model.num_dense_layers is 5 of 5): it must be 1",
    ),
    (
        ["model.moe.expert_hidden_size=34"],
        1,
        "model.moe.expert_hidden_size (34) must be a multiple of 4 with train.precision fp32: "
        "the grouped matrix product of the experts needs rows of a multiple of 16 bytes",
    ),
    (
        ["model.hidden_size=60", "train.precision=bf16"],
        1,
        "model.hidden_size (60) must be a multiple of 8 with train.precision bf16: "
        "the grouped matrix product of the experts needs rows of a multiple of 16 bytes",
    ),
    # ----------------------------------------------------------------------------------- balance
    (
        ["balance.ep_groups=3"],
        1,
        "balance.ep_groups (3) must divide model.moe.num_experts (8): it can be 1, 2, 4, 8",
    ),
    (
        ["balance.ep_groups=1"],
        1,
        "balance.ep_loss_coefficient is 0.001, but the balance loss of a single group is constant (balance.ep_groups "
        "is 1 and parallel.expert 1): take more groups (balance.ep_groups can be 1, 2, 4, 8) or the coefficient 0",
    ),
    (
        ["balance.ep_groups=1", "balance.ep_loss_coefficient=1e-2", "parallel.expert=2"],
        2,
        "balance.ep_loss_coefficient is 0.01, but the balance loss of a single group is constant (balance.ep_groups "
        "is 1 and parallel.expert 2): take more groups (balance.ep_groups can be 1, 2, 4, 8) or the coefficient 0",
    ),
    (
        ["balance.ep_loss_coefficient=1e-2"],
        1,
        "balance.ep_loss_coefficient is 0.01, but the balance loss of a single group is constant (balance.ep_groups "
        "is unset and parallel.expert 1): take more groups (balance.ep_groups can be 1, 2, 4, 8) or the coefficient 0",
    ),
    *(
        (
            [f"balance.{name}={value}", ALL_DENSE],
            1,
            f"balance.{name} is set, but the model has no MoE layer (model.num_dense_layers is 5 of 5): leave it out",
        )
        for name, value in (("ep_loss_coefficient", 1e-2), ("bias.rate", 1e-2))
    ),
    (
        ["balance.bias={decay_start_step: 1, decay_steps: 5}", ALL_DENSE],
        1,
        "balance.bias.decay_steps is set, but the model has no MoE layer (model.num_dense_layers is 5 of 5): "
        "leave it out",
    ),
    (
        ["balance.ep_groups=2", ALL_DENSE],
        1,
        "balance.ep_groups is set, but the model has no MoE layer (model.num_dense_layers is 5 of 5): leave it out",
    ),
    (
        ["balance.freeze_router=true", ALL_DENSE],
        1,
        "balance.freeze_router is set, but the model has no MoE layer (model.num_dense_layers is 5 of 5): leave it out",
    ),
    (
        ["balance.bias.decay_steps=10"],
        1,
        "balance.bias.decay_start_step and balance.bias.decay_steps belong together: set both or neither "
        "(they are unset and 10)",
    ),
    (
        ["balance.bias.decay_start_step=0"],
        1,
        "balance.bias.decay_start_step and balance.bias.decay_steps belong together: set both or neither "
        "(they are 0 and unset)",
    ),
    (
        ["balance.freeze_router=true", "balance.bias.rate=1e-3"],
        1,
        "balance.freeze_router keeps the selection biases as they are, but balance.bias.rate is 0.001: "
        "set the rate to 0 or leave it out",
    ),
    (
        ["balance.freeze_router=true", "balance.ep_loss_coefficient=1e-3", "balance.ep_groups=2"],
        1,
        "balance.freeze_router keeps the router as it is, but balance.ep_loss_coefficient is 0.001, "
        "which would push the hidden states instead: set it to 0 or leave it out",
    ),
    (
        ["optimizer.name=sgd", "optimizer.beta2=0.9"],
        1,
        "optimizer.beta2 is set, but optimizer.name is sgd, which has no moments: leave it out",
    ),
    (
        ["balance.bias={rate: 0, decay_start_step: 1, decay_steps: 5}"],
        1,
        "balance.bias.decay_steps is set, but balance.bias.rate is 0: there is nothing to decay, leave it out",
    ),
    # -------------------------------------------------------------------------------------- loss
    (
        ["model.mtp={depths: 0, chain: post_norm}"],
        1,
        "model.mtp.chain is set, but model.mtp.depths is 0: leave it out",
    ),
    (
        ["loss={mtp_train_depths: 0, mtp_weight: 0.1}"],
        1,
        "loss.mtp_weight is set, but loss.mtp_train_depths is 0, so that no MTP loss exists: leave it out",
    ),
    (
        ["loss.mtp_train_depths=2", "model.mtp.depths=1"],
        1,
        "loss.mtp_train_depths (2) must not exceed model.mtp.depths (1)",
    ),
    (["loss.mtp_train_depths=1"], 1, "loss.mtp_train_depths (1) must not exceed model.mtp.depths (0)"),
    (
        ["model.mtp.depths=3", "loss.mtp_train_depths=3", "data.sequence_length=3"],
        1,
        "data.sequence_length (3) must be greater than loss.mtp_train_depths (3): "
        "the furthest depth predicts 4 tokens ahead and would have no target",
    ),
    # ---------------------------------------------------------------------------------- parallel
    (
        ["parallel.virtual_pipeline=2"],
        1,
        "parallel.virtual_pipeline is 2, but parallel.pipeline is 1: stages are interleaved over at least 2 pipeline "
        "ranks; set parallel.virtual_pipeline to 1 or parallel.pipeline to 2 or more",
    ),
    (
        ["parallel.pipeline=6"],
        6,
        "parallel.pipeline x virtual_pipeline (6 x 1 = 6) must not exceed model.num_layers (5): "
        "each stage holds at least one layer, unless parallel.pipeline_layout leaves some empty",
    ),
    (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=3"],
        2,
        "parallel.pipeline x virtual_pipeline (2 x 3 = 6) must not exceed model.num_layers (5): "
        "each stage holds at least one layer, unless parallel.pipeline_layout leaves some empty",
    ),
    (
        ["parallel.pipeline_layout=Et*5L"],
        1,
        "parallel.pipeline_layout is set, but there is one stage (parallel.pipeline and virtual_pipeline are 1): "
        "leave it out",
    ),
    (
        ["parallel.pipeline=2", "parallel.pipeline_layout=Ett|ttL"],
        2,
        "parallel.pipeline_layout (Ett|ttL) has 4 of t, but model.num_layers is 5: write exactly 5 of t",
    ),
    (
        ["parallel.pipeline=2", "parallel.pipeline_layout=Ett|tttL", "model.mtp.depths=1"],
        2,
        "parallel.pipeline_layout (Ett|tttL) has 0 of m, but model.mtp.depths is 1: write exactly 1 of m",
    ),
    (
        ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.pipeline_layout=Ett|tttL"],
        2,
        "parallel.pipeline_layout (Ett|tttL) has 2 stages, but parallel.pipeline x virtual_pipeline is 4: "
        "write 3 of | between stages",
    ),
    (
        ["parallel.tensor=2", "model.vocab_size=1"],
        2,
        "model.vocab_size (1) is too small for parallel.tensor (2): in parts of 1 rows nothing is left for the last "
        "rank",
    ),
    (
        ["parallel.tensor=2", "model.dense_hidden_size=161"],
        2,
        "model.dense_hidden_size (161) must be a multiple of parallel.tensor (2): parallel.tensor can be 1",
    ),
    (
        ["parallel.tensor=2", "model.moe.shared_hidden_size=33"],
        2,
        "model.moe.shared_hidden_size (33) must be a multiple of parallel.tensor (2): parallel.tensor can be 1",
    ),
    (
        ["parallel.tensor=2", "model.full.num_kv_groups=1"],
        2,
        "model.full.num_kv_groups (1) must be a multiple of parallel.tensor (2); more tensor-parallel ranks than KV "
        "groups are not supported: parallel.tensor can be 1",
    ),
    (
        ["parallel.tensor=2", "data.sequence_length=33"],
        2,
        "data.sequence_length (33) must be a multiple of 2 (parallel.tensor), so that every rank holds equally many "
        "tokens",
    ),
    (
        ["parallel.context=2", "data.sequence_length=34"],
        2,
        "data.sequence_length (34) must be a multiple of 4 (of 2 x parallel.context (4) and of "
        "parallel.context x tensor (2)), so that every rank holds equally many tokens",
    ),
    (
        ["parallel.context=2", "parallel.tensor=2", "data.sequence_length=34"],
        4,
        "data.sequence_length (34) must be a multiple of 4 (of 2 x parallel.context (4) and of "
        "parallel.context x tensor (4)), so that every rank holds equally many tokens",
    ),
    (
        ["parallel.context=2", "parallel.tensor=2"],
        6,
        "the number of processes (6) must be a multiple of parallel.pipeline x tensor x context (1 x 2 x 2 = 4)",
    ),
    (
        ["parallel.node_size=3", "train.global_batch_size=8"],
        4,
        "parallel.node_size is 3, but it must divide the number of processes (4): it can be 1, 2, 4, or unset",
    ),
    (
        # A stage's 6 ranks on nodes of 4.
        ["parallel.pipeline=2", "parallel.node_size=4", "train.global_batch_size=12"],
        12,
        "parallel.node_size is 4, but nodes would hold different numbers of the ranks that add up a gradient "
        "(over 2 pipeline x 1 tensor x 1 context x 1 expert ranks): it can be 1, 2, 3, 6, 12, or unset",
    ),
    (
        # Ranks 0, 4, 8 hold the same experts: two of them on the first node, one on the second.
        ["parallel.expert=4", "parallel.node_size=6", "train.global_batch_size=24"],
        12,
        "parallel.node_size is 6, but nodes would hold different numbers of the ranks that add up a gradient "
        "(over 1 pipeline x 1 tensor x 1 context x 4 expert ranks): it can be 1, 2, 3, 4, 12, or unset",
    ),
    (
        ["parallel.dispatcher=flex"],
        1,
        "parallel.dispatcher is flex, but parallel.expert is 1, so that no token travels: set it to alltoall or "
        "allgather",
    ),
    (
        ["parallel.dispatcher=flex", "parallel.expert=2"],
        2,
        "parallel.dispatcher is flex, which is DeepEP's, for GPUs, but there is no CUDA device here: set it to "
        "alltoall or allgather",
    ),
    (
        ["parallel.dispatcher=flex", "parallel.expert=2", "train.device=cpu"],
        2,
        "parallel.dispatcher is flex, which is DeepEP's, for GPUs, but train.device is cpu: set it to alltoall or "
        "allgather",
    ),
    (
        ["parallel.overlap_expert_communication=true"],
        1,
        "parallel.overlap_expert_communication is true, but parallel.expert is 1, so that no token travels: "
        "set it to false",
    ),
    (
        ["parallel.overlap_expert_communication=true", "parallel.expert=2"],
        2,
        "parallel.overlap_expert_communication is true, which needs the streams of a GPU, but there is no CUDA device "
        "here: set it to false",
    ),
    (
        ["parallel.pipeline=2"],
        3,
        "the number of processes (3) must be a multiple of parallel.pipeline x tensor x context (2 x 1 x 1 = 2)",
    ),
    (
        ["parallel.pipeline=4"],
        2,
        "the number of processes (2) must be a multiple of parallel.pipeline x tensor x context (4 x 1 x 1 = 4)",
    ),
    (
        ["parallel.pipeline=2", "parallel.expert=4"],
        4,
        "the number of processes (4) over parallel.pipeline (2) leaves 2 per stage, which must be a multiple of "
        "parallel.expert (4): take a multiple of 8 processes",
    ),
    (
        [],
        0,
        "the number of processes (0) must be a multiple of parallel.pipeline x tensor x context (1 x 1 x 1 = 1)",
    ),
    # ------------------------------------------------------------------------------------- batch
    (
        ["train.global_batch_size=5"],
        1,
        "train.global_batch_size (5) must be a multiple of train.micro_batch_size x data-parallel ranks (2 x 1 = 2)",
    ),
    (
        ["parallel.expert=4"],
        4,
        "train.global_batch_size (4) must be a multiple of train.micro_batch_size x data-parallel ranks (2 x 4 = 8)",
    ),
    (
        ["train.batch_ramp={start: 6, increment: 2, sequences: 8}"],
        1,
        "train.batch_ramp.start (6) must not exceed train.global_batch_size (4)",
    ),
    (
        ["train.batch_ramp={start: 2, increment: 4, sequences: 8}", "train.global_batch_size=8"],
        1,
        "train.batch_ramp.increment (4) must divide the way from train.batch_ramp.start (2) to "
        "train.global_batch_size (8), which is 6",
    ),
    (
        ["train.batch_ramp={start: 2, increment: 1, sequences: 8}"],
        1,
        "train.batch_ramp.increment (1) must be a multiple of train.micro_batch_size x data-parallel ranks (2 x 1 = 2)",
    ),
    *(
        (
            ["parallel.pipeline=2", "parallel.virtual_pipeline=2", *overrides],
            4,
            f"{name} ({size}) must be a multiple of train.micro_batch_size x data-parallel ranks x parallel.pipeline "
            "(2 x 2 x 2 = 8): with parallel.virtual_pipeline above 1 micro-batches pass in groups of parallel.pipeline",
        )
        for overrides, name, size in (
            (["train.global_batch_size=12"], "train.global_batch_size", 12),
            (
                ["train.global_batch_size=16", "train.batch_ramp={start: 8, increment: 4, sequences: 8}"],
                "train.batch_ramp.increment",
                4,
            ),
        )
    ),
    # -------------------------------------------------------------------------------------- data
    (
        ["data.packing=best_fit", "data.document_attention=crossing"],
        1,
        "data.packing is best_fit, whose documents have nothing to do with each other, but data.document_attention is "
        "crossing: set it to isolated, or data.packing to stream",
    ),
    # ---------------------------------------------------------------------------------- schedule
    (
        ["optimizer.schedule.warmup_steps=10"],
        1,
        "optimizer.schedule.warmup_steps (10) must be less than train.steps (10)",
    ),
    (
        ["optimizer.schedule.min_lr=1e-2"],
        1,
        "optimizer.schedule.min_lr (0.01) must not exceed optimizer.lr (0.001)",
    ),
    (
        ["optimizer.schedule={kind: constant, min_lr: 1e-4}"],
        1,
        "optimizer.schedule.min_lr (0.0001) is the end of the cosine, but optimizer.schedule.kind is constant: "
        "leave it out",
    ),
    (
        ["optimizer.schedule={segments: [{steps: 10, end_lr: 0}]}"],
        1,
        "optimizer.schedule.segments belongs to kind staged, but optimizer.schedule.kind is cosine: "
        "leave it out or set the kind to staged",
    ),
    (
        ["optimizer.schedule.kind=staged"],
        1,
        "optimizer.schedule.segments is empty: kind staged needs at least one segment",
    ),
    (
        [STAGED],
        1,
        "optimizer.schedule: warmup_steps and segments cover 9 steps, but train.steps is 10: "
        "lengthen the segments or add one",
    ),
    # --------------------------------------------------------------------------------- optimizer
    (
        ["optimizer.roles={querry: {lr_multiplier: 2}}"],
        1,
        f"optimizer.roles.querry: no parameter has this role; roles are {ROLES}",
    ),
    (
        ["optimizer.roles={router_bias: {decay: false}}"],  # is updated, but by no optimizer
        1,
        f"optimizer.roles.router_bias: no parameter has this role; roles are {ROLES}",
    ),
    (
        ["optimizer.roles={sink: {decay: false}}"],
        1,
        "optimizer.roles.sink is set, but the run trains no such parameter: leave it out",
    ),
    (
        ["optimizer.roles={mtp_projection: {decay: false}}", "model.mtp.depths=1", "loss.mtp_train_depths=0"],
        1,
        "optimizer.roles.mtp_projection is set, but the run trains no such parameter: leave it out",
    ),
    (
        ["optimizer.roles={router: {optimizer: muon}}", "balance.freeze_router=true"],
        1,
        "optimizer.roles.router is set, but balance.freeze_router keeps the router as it is: leave it out",
    ),
    (
        ["optimizer.name=adamw", "optimizer.roles={query: {optimizer: muon}}"],
        1,
        "optimizer.roles.query.optimizer is muon, but optimizer.name is adamw, which takes all parameters: "
        "leave it out, or set the name to muon",
    ),
    *(
        (
            [f"optimizer.roles={{{role}: {{optimizer: muon}}}}"],
            1,
            f"optimizer.roles.{role}.optimizer is muon, which takes matrices of features ({HIDDEN}): leave it out",
        )
        for role in ("embedding", "head", "norm")
    ),
    (
        ["optimizer.weight_decay=0", "optimizer.roles={norm: {decay: true}}"],
        1,
        "optimizer.roles.norm.decay is true, but optimizer.weight_decay is 0: leave it out, or set that",
    ),
    *(
        (
            [f"optimizer.name={name}", f"optimizer.muon.{field}={value}"],
            1,
            f"optimizer.muon.{field} is set, but optimizer.name is {name}: leave it out",
        )
        for name, field, value in (
            ("adamw", "momentum", 0.9),
            ("sgd", "precision", "fp32"),
            ("adamw", "nesterov", "false"),
            ("adamw", "diagnostics.every_steps", 10),
        )
    ),
    (
        ["optimizer.muon.diagnostics.sample=4"],
        1,
        "optimizer.muon.diagnostics.sample is set, but without optimizer.muon.diagnostics.every_steps nothing is "
        "recorded: set that too, or leave it out",
    ),
    (
        ["optimizer.sharding={reduction: all_reduce, max_padding: 0.3}"],
        1,
        "optimizer.sharding.max_padding is set, but optimizer.sharding.reduction is all_reduce, which takes any "
        "padding: leave it out, or set the reduction to auto",
    ),
    (
        ["optimizer.weight_clipping.threshold=100", ALL_DENSE],
        1,
        "optimizer.weight_clipping.threshold is set, but the model has no MoE layer (model.num_dense_layers is 5 of "
        "5): leave it out",
    ),
    # ----------------------------------------------------------------------------------- machine
    (
        ["train.device=cuda"],
        1,
        "train.device is cuda, but there is no CUDA device here: set it to cpu or auto",
    ),
    (
        ["parallel.timeout_seconds=60", "train.faults.hang_after_seconds=60"],
        1,
        "train.faults.hang_after_seconds (60) must be less than parallel.timeout_seconds (60), after which a process "
        "that waits gives up, and nobody would know for whom",
    ),
    # -------------------------------------------------------------------------------- initial weights
    (
        ["model.mtp.depths=1", "train.initial_weights_missing={mtp: clone}"],
        1,
        "train.initial_weights_missing.mtp is set, but train.initial_weights is not: leave it out",
    ),
    (
        ["train.initial_weights=w", "train.initial_weights_missing={mtp: clone}"],
        1,
        "train.initial_weights_missing.mtp is set, but model.mtp.depths is 0: leave it out",
    ),
    (
        ["train.initial_weights=w", "train.initial_weights_missing={value_head: initialise}"],
        1,
        "train.initial_weights_missing.value_head is set, but model.value_head is false: leave it out",
    ),
]


@pytest.mark.parametrize(("overrides", "world_size", "problem"), REFUSED)
def test_refused(overrides: list[str], world_size: int, problem: str) -> None:
    assert problems(*overrides, world_size=world_size) == (problem,)


def test_an_index_cache_needs_a_stage_that_reads_streams() -> None:
    packed = config("data.packing=best_fit", "data.index_cache=index")
    with pytest.raises(ConfigError) as caught:
        check_stages(Curriculum.of(packed), 1, "cpu")
    assert caught.value.problems == (
        "data.index_cache is set, but data.packing is best_fit, which processes compute in memory: leave it out",
    )
    streamed = Stage(config("data.index_cache=index"))
    check_stages(Curriculum((streamed, Stage(packed))), 1, "cpu")


def test_every_size_of_a_batch_ramp_must_fit() -> None:
    assert problems(
        "train.batch_ramp={start: 2, increment: 4, sequences: 8}", "train.global_batch_size=6", world_size=2
    ) == (
        "train.global_batch_size (6) must be a multiple of train.micro_batch_size x data-parallel ranks (2 x 2 = 4)",
        "train.batch_ramp.start (2) must be a multiple of train.micro_batch_size x data-parallel ranks (2 x 2 = 4)",
    )


def test_heads_and_groups_must_divide_by_tensor_ranks() -> None:
    more = "; more tensor-parallel ranks than KV groups are not supported: parallel.tensor can be 1, 2"
    assert problems("parallel.tensor=4", world_size=4) == (
        "model.sliding.num_heads (6) must be a multiple of parallel.tensor (4): parallel.tensor can be 1, 2",
        f"model.full.num_kv_groups (2) must be a multiple of parallel.tensor (4){more}",
        f"model.sliding.num_kv_groups (2) must be a multiple of parallel.tensor (4){more}",
    )


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check(config("model.layout=X", "model.moe.top_k=9", "train.global_batch_size=3"), 2, "cpu")
    lines = str(caught.value).splitlines()
    assert lines[0] == "configuration for 2 processes: 3 problems"
    assert [line.split()[1] for line in lines[1:]] == ["model.layout:", "model.moe.top_k", "train.global_batch_size"]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        ([], 2),
        (["parallel.pipeline=2"], 2),
        (["parallel.pipeline=5"], 5),
        (["parallel.pipeline=2", "parallel.expert=2", "parallel.dispatcher=allgather"], 4),
        (["parallel.expert=8", "train.global_batch_size=16"], 8),
        (["parallel.dispatcher=allgather"], 1),
        (["parallel.tensor=2", "parallel.expert=2"], 2),
        (["parallel.tensor=2", "parallel.expert=4", "train.global_batch_size=8"], 8),
        (["parallel.context=4", "parallel.expert=4"], 4),
        (["parallel.context=2", "parallel.tensor=2", "data.sequence_length=36"], 4),
        (["data.sequence_length=33"], 1),
        # Widths that no layer has, and heads that no layer reads, need not divide.
        (["parallel.tensor=2", "model.num_dense_layers=0", "model.dense_hidden_size=161"], 2),
        (["parallel.tensor=2", ALL_DENSE, "model.moe.shared_hidden_size=33"], 2),
        (["parallel.tensor=2", "model.layout=S3F1", "model.sliding.num_heads=7"], 2),
        (["parallel.tensor=2", "model.layout=FFFF", "model.sliding.num_kv_groups=3"], 2),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2"], 2),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2", "train.global_batch_size=16"], 4),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.pipeline_layout=E|t*3||ttL"], 2),
        (["parallel.pipeline=6", "parallel.pipeline_layout=E(t|)*5L"], 6),
        (["parallel.pipeline=2", "parallel.pipeline_layout=Et*4|tmL", "model.mtp.depths=1"], 2),
        (["parallel.node_size=2", "train.global_batch_size=8"], 4),
        (["parallel.node_size=8", "train.global_batch_size=8"], 4),
        (["parallel.node_size=4", "parallel.pipeline=4", "train.global_batch_size=4"], 8),
        (["parallel.node_size=2", "parallel.expert=4", "train.global_batch_size=16"], 8),
        (["train.precision=bf16"], 1),
        (["train.device=cpu"], 1),
        (["model.layout=FFFF+gate"], 1),
        # Defaults, and weights of 0, suit models that have nothing to balance.
        ([ALL_DENSE], 1),
        ([ALL_DENSE, "balance.ep_loss_coefficient=0", "balance.bias.rate=0"], 1),
        (["balance.ep_loss_coefficient=1e-3"], 1),
        (["balance.ep_groups=1", "balance.ep_loss_coefficient=0"], 1),
        (["balance.ep_loss_coefficient=1e-2", "balance.ep_groups=2"], 1),
        (["balance.ep_loss_coefficient=1e-2", "parallel.expert=2"], 2),
        (["model.layout=FFFF+heads", "model.mtp.depths=1"], 1),
        # Without sliding layers their shape does not matter.
        (["model.layout=FFFF", "model.sliding.num_heads=7"], 1),
        (["model.layout=S1F1+sink"], 1),
        (["model.layout=S3F1", "model.sliding.num_heads=7"], 1),
        (["model.full.rope.rotary_fraction=0.5"], 1),
        (["model.sliding.window=1000"], 1),
        ([ALL_DENSE], 1),
        ([ALL_DENSE, "model.clamp.shared={0: 7}"], 1),
        (["model.clamp={routed: {1: 7, 4: 7}, shared: {0: 16, 4: 16}}"], 1),
        (["model.mtp={depths: 2, head: shared, chain: post_norm}", "parallel.pipeline=2"], 2),
        (["balance.ep_groups=1", "balance.ep_loss_coefficient=0"], 1),
        (["balance.ep_groups=8", "parallel.expert=2"], 2),
        (["balance.freeze_router=true"], 1),
        (["balance.freeze_router=true", "balance.bias.rate=0"], 1),
        (["balance.bias.decay_start_step=5", "balance.bias.decay_steps=5"], 1),
        ([STAGED, "train.steps=9"], 1),
        ([STAGED, "train.steps=5"], 1),  # stops early
        (["optimizer.schedule={kind: constant, warmup_steps: 9}"], 1),
        (["optimizer.schedule.min_lr=1e-3"], 1),
        (["optimizer.roles={router: {optimizer: muon, lr_multiplier: 0}, query: {optimizer: adamw, decay: false}}"], 1),
        (["optimizer.name=sgd", "optimizer.roles={embedding: {lr_multiplier: 2}}"], 1),
        (["optimizer.roles={sink: {decay: true}}", "model.layout=S3F1+sink"], 1),
        (["optimizer.muon={batch_elements: 256, diagnostics: {every_steps: 5, sample: 3}}"], 1),
        (["optimizer.muon.batch_elements=2048", "model.layout=FFFF"], 1),
        (["optimizer.sharding={reduction: auto, max_padding: 0.3}"], 1),
        (["optimizer.weight_clipping.threshold=100"], 1),
        (["train.batch_ramp={start: 2, increment: 2, sequences: 8}"], 1),
        (["train.output=runs/new/deep"], 1),
    ],
)
def test_accepted(overrides: list[str], world_size: int) -> None:
    check(config(*overrides), world_size, "cpu")


# ---------------------------------------------------------------------------------------- machine


@pytest.mark.parametrize("present", [False, True])
def test_cuda_is_looked_for_where_asked(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_has_cuda", lambda: present)
    asked = config("train.device=cuda")
    check(asked, 1, "cuda")
    if present:
        check(asked, 1)
    else:
        with pytest.raises(ConfigError, match="there is no CUDA device here"):
            check(asked, 1)


@pytest.mark.parametrize(
    ("package", "override", "problem"),
    [
        (
            "tensorboard",
            "train.logging.tensorboard=true",
            "train.logging.tensorboard is true, but TensorBoard is not installed: "
            "`pip install tensorboard`, or set it to false",
        ),
        (
            "wandb",
            "train.logging.wandb_project=moe",
            "train.logging.wandb_project is 'moe', but Weights & Biases is not installed: "
            "`pip install wandb`, or set it to null",
        ),
    ],
)
def test_loggers_must_be_installed(package: str, override: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = {"tensorboard", "wandb"} - {package}

    def find_spec(name: str) -> object:
        return types.SimpleNamespace() if name in found else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert problems(override) == (problem,)
    found.add(package)
    check(config(override), 1, "cpu")


def test_output_must_be_a_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path(), "runs/out", "")
    here = Path.cwd()
    assert problems() == ("train.output (runs/out) cannot be a folder: runs/out is a file",)
    assert problems("train.output=runs/out/deep") == (
        f"train.output (runs/out/deep) cannot be a folder: {here}/runs/out is a file",
    )
    long = "x" * 5000
    assert problems(f"train.output={long}") == (f"train.output ({long}) cannot be used: File name too long",)
    asked: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path) or False)
    assert problems("train.output=new/deep") == (
        f"train.output (new/deep) cannot be written: no permission to write in {here}",
    )
    assert asked == [here]


def test_data_folders_with_impossible_names() -> None:
    assert "does not exist" in problems(f"data.train=[{{path: {'x' * 5000}}}]", check_data=True)[0]


def test_data_folders_must_exist_when_asked() -> None:
    write(Path(), "runs/a/index", "")
    write(Path(), "runs/b", "")
    check(config(), 1, "cpu")
    hint = "write it with `steptron data build` (the path is relative to the current working directory)"
    assert problems("data.validation=[{path: runs/c}]", check_data=True) == (
        f"data.train.1.path (runs/b) is not a folder: {hint}",
        f"data.validation.0.path (runs/c) does not exist: {hint}",
    )


# ---------------------------------------------------------------------------- expert communication


FLEX = ["parallel.dispatcher=flex", "parallel.overlap_expert_communication=true", "parallel.expert=2"]


def test_flex_and_overlap_on_this_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_has_cuda", lambda: True)
    asked = config(*FLEX, "train.precision=bf16")
    installed = {"tensorboard"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: types.SimpleNamespace() if name in installed else None)
    with pytest.raises(ConfigError) as caught:
        check(asked, 2)
    assert caught.value.problems == (
        "parallel.dispatcher is flex, but DeepEP (package deep_ep, https://github.com/deepseek-ai/DeepEP) is not "
        "installed: install it, or set it to alltoall or allgather",
    )
    check(asked, 2, "cuda")  # what other machines have installed is not known here
    installed.add("deep_ep")
    check(asked, 2)


def test_overlap_and_the_allgather_dispatcher_share_a_buffer_under_tensor_parallelism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_has_cuda", lambda: True)
    asked = ["parallel.overlap_expert_communication=true", "parallel.expert=2", "parallel.dispatcher=allgather"]
    check(config(*asked), 2)
    with pytest.raises(ConfigError, match=r"overlap_expert.*allgather and parallel\.tensor 2.*same buffer"):
        check(config(*asked, "parallel.tensor=2"), 2)


DEEP_EP = [
    (
        [],
        2,
        "parallel.dispatcher is flex, and DeepEP carries bf16 only, but train.precision is fp32: set it to bf16, or "
        "the dispatcher to alltoall or allgather",
    ),
    (
        ["train.precision=bf16", "parallel.expert=3", "model.moe.num_experts=9", "train.global_batch_size=6"],
        3,
        "parallel.dispatcher is flex, and DeepEP has no configuration for parallel.expert 3: it can be "
        "2, 4, 8, 16, 24, 32, 64, 128, 144, 160",
    ),
    (
        ["train.precision=bf16", "parallel.expert=16", "model.moe.num_experts=16", "train.global_batch_size=32"],
        16,
        "model.hidden_size (64) must be a multiple of 256 with parallel.dispatcher flex over more than 8 ranks "
        "(parallel.expert is 16)",
    ),
]


@pytest.mark.parametrize(("overrides", "world_size", "problem"), DEEP_EP)
def test_what_deep_ep_cannot_carry(overrides: list[str], world_size: int, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(*FLEX, *overrides), world_size, "cuda")
    assert caught.value.problems == (problem,)


# ----------------------------------------------------------------------------------------- layout


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 4),
    st.integers(1, 48),
)
def test_accepted_node_sizes_share_every_group_evenly(
    pipeline: int, tensor: int, expert: int, replicas: int, node_size: int
) -> None:
    """Against the ranks of each group, written out."""
    parallel = ParallelConfig(pipeline=pipeline, tensor=tensor, expert=expert, node_size=node_size)
    world_size = replicas * smallest_world_size(parallel)
    stage_size = world_size // pipeline
    groups = [
        range(first, stage + stage_size, distance)
        for distance in (1, tensor, expert)
        for stage in range(0, world_size, stage_size)
        for first in range(stage, stage + distance)
    ]
    even = all(len(set(Counter(rank // node_size for rank in group).values())) == 1 for group in groups)
    refused = list(checks._nodes(parallel, world_size))
    assert refused or even
    aligned = stage_size % node_size == 0 or node_size % stage_size == 0
    if even and aligned and world_size % node_size == 0:
        assert not refused


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ({}, 1),
        ({"expert": 2}, 2),
        ({"pipeline": 2, "expert": 2}, 4),
        ({"pipeline": 8, "expert": 8}, 64),
        ({"tensor": 2, "context": 2, "expert": 8}, 8),
        ({"tensor": 3, "expert": 2}, 6),
    ],
)
def test_smallest_world_size(layout: dict[str, int], size: int) -> None:
    assert smallest_world_size(ParallelConfig(**layout)) == size


# ------------------------------------------------------------------------------ operations on the CPU

KERNELS = [
    (["train.kernels=native", "train.precision=bf16"], "train.kernels is native, which is for train.precision fp32"),
    (["train.products=bf16", "train.precision=bf16"], "train.products is bf16, which is for train.precision fp32"),
    (["train.products=bf16", "train.kernels=plain"], "needs the native kernels, but train.kernels is plain"),
]


@pytest.mark.parametrize("overrides, words", KERNELS)
def test_operations_that_do_not_go_together(overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_fast_bf16", lambda: True)
    (problem,) = problems(*overrides)
    assert words in problem


def test_bf16_products_need_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_fast_bf16", lambda: False)
    (problem,) = problems("train.products=bf16")
    assert "neither AVX512-BF16 nor AMX" in problem
    check(config("train.products=auto"), 1, "cpu")


@pytest.mark.parametrize("override", ["train.kernels=native", "train.products=bf16"])
def test_a_missing_library_is_seen_before_any_process_starts(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "has_fast_bf16", lambda: True)
    monkeypatch.setattr(checks, "why_unfit", lambda: "it was not built")
    (problem,) = problems(override)
    assert problem.endswith(", but it was not built")
    check(config("train.kernels=auto"), 1, "cpu")


def test_native_operations_are_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="is for CPUs, but the run is on a GPU"):
        check(config("train.kernels=native"), 1, "cuda")
