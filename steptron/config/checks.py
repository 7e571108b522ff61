"""Checks that need several sections, the number of processes or the machine; run before any process starts."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from steptron.config.layout import AttentionKind, parse_layout
from steptron.config.pipeline_layout import parse_pipeline_layout
from steptron.config.recompute import parse_layers
from steptron.config.schema import (
    DataConfig,
    LossConfig,
    ModelConfig,
    MtpConfig,
    ParallelConfig,
    PretrainConfig,
    Section,
    TelemetryConfig,
    TrainConfig,
)
from steptron.config.stages import Curriculum
from steptron.errors import ConfigError
from steptron.model.layer_spec import ParameterRole, model_spec, trained_parameters
from steptron.optim.rules import ORTHOGONALISABLE, TRAINED_ROLES
from steptron.optim.schedule import warmup_steps
from steptron.telemetry.quantities import DEFAULTS
from steptron_kernels.extension import has_fast_bf16, why_unfit

# torch.nn.functional.grouped_mm, which computes the experts, needs rows of a multiple of 16 bytes.
_ROW_MULTIPLE = {"fp32": 4, "bf16": 8}
# Group sizes that DeepEP's high-throughput kernels are configured for (deep_ep.Buffer.get_dispatch_config). Beyond the
# 8 GPUs of a node they combine rows in pieces of 256 numbers (csrc/kernels/internode.cu: hidden_int4 % 32 == 0).
_DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
_DEEP_EP_NODE = 8
_DEEP_EP_HIDDEN_MULTIPLE = 256


def check(
    config: PretrainConfig,
    world_size: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    check_data: bool = False,
) -> None:
    """Refuses what cannot run.

    Args:
        config: a configuration that is valid field by field.
        world_size: number of processes.
        device: what the processes will find: "cuda" where there are CUDA devices; "auto": as on this machine.
        check_data: whether the dataset folders must exist.

    Raises:
        ConfigError: lists every problem, each with the fields and the values that would be right.
    """
    problems = [
        *_attention(config.model),
        *_layers(config.model),
        *_experts(config),
        *_balance(config),
        *_loss(config),
        *_freezing(config),
        *_metadata(config),
        *_parallel(config, world_size),
        *_expert_communication(config, device),
        *_batch(config, world_size),
        *_optimizer(config),
        *_schedule(config),
        *_recompute(config),
        *_machine(config.train, device),
        *_kernels(config.train, config.parallel, device),
        *_output(config.train.output),
        *_missing_weights(config),
        *_faults(config),
        *_index_cache(config.data.index_cache),
        *_packing(config.data),
        *_telemetry(config.telemetry),
        *(_data_folders(config) if check_data else ()),
    ]
    if problems:
        raise ConfigError(f"configuration for {world_size} process{'' if world_size == 1 else 'es'}", problems)


def check_stages(
    curriculum: Curriculum,
    world_size: int,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    check_data: bool = False,
) -> None:
    """Refuses a run of which some stage cannot run; see :func:`check`.

    Raises:
        ConfigError: lists every problem, each once, with the first stage that has it.
    """
    problems: dict[str, str] = {}
    title = ""
    for stage in curriculum.stages:
        try:
            check(stage.config, world_size, device, check_data=check_data)
        except ConfigError as error:
            title = error.title
            for problem in error.problems:
                problems.setdefault(problem, f"stage {stage.name}: {problem}" if stage.name else problem)
        if stage.clone_mtp and (stage.number == 0 or stage.config.loss.mtp_train_depths < 2):
            text = (
                f"stages.{stage.number}.clone_mtp copies MTP depth 1, which an earlier stage has trained, to others "
                "that this one trains: it needs a stage before it and loss.mtp_train_depths of at least 2"
            )
            title, problems[text] = title or f"stage {stage.name}", text
    data = [stage.config.data for stage in curriculum.stages]
    # The folder is the run's: stages that pack have no use for it, others may.
    if data[0].index_cache is not None and all(own.packing == "best_fit" for own in data):
        text = "data.index_cache is set, but data.packing is best_fit, which processes compute in memory: leave it out"
        title, problems[text] = title or "configuration", text
    if problems:
        raise ConfigError(title, list(problems.values()))


def smallest_world_size(parallel: ParallelConfig) -> int:
    """The fewest processes that a layout can run on."""
    return parallel.pipeline * math.lcm(parallel.tensor * parallel.context, parallel.expert)


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Data-parallel ranks of the attention layers; 0 where the layout does not fit."""
    ranks, left = divmod(world_size, parallel.pipeline * parallel.tensor * parallel.context)
    return 0 if left else ranks


# ------------------------------------------------------------------------------------------ model


def _attention(model: ModelConfig) -> Iterator[str]:
    if re.search(r"\d{5}", model.layout):
        yield f"model.layout: layout {model.layout!r} has a count above 9999"
        return
    try:
        _, options = parse_layout(model.layout)
    except ValueError as error:
        yield f"model.layout: {error}"
        return
    kinds = attention_kinds(model)
    if "heads" in options and AttentionKind.SLIDING not in kinds:
        yield (
            f"model.layout ({model.layout}) asks for +heads, but the model has no sliding layer: "
            "drop +heads, or take S1F1 or S3F1 (or model.mtp.depths above 0, whose layers slide)"
        )
    for kind in sorted(kinds, key=lambda kind: kind.value):
        section = model.sliding if kind is AttentionKind.SLIDING else model.full
        owner = section if kind is AttentionKind.FULL or "heads" in options else model.full
        heads_field = f"model.{'full' if owner is model.full else 'sliding'}.num_heads"
        if owner.num_heads % section.num_kv_groups:
            why = "" if owner is section else f" (without +heads in model.layout, {kind.value} layers take it too)"
            yield (
                f"{heads_field} ({owner.num_heads}) must be a multiple of model.{kind.value}.num_kv_groups "
                f"({section.num_kv_groups}){why}"
            )
        rotated = section.rope.rotary_fraction * model.head_dim
        if abs(rotated - round(rotated)) > 1e-6 or round(rotated) % 2 or round(rotated) == 0:
            yield (
                f"model.{kind.value}.rope.rotary_fraction ({section.rope.rotary_fraction}) x model.head_dim "
                f"({model.head_dim}) gives {rotated:g} rotated dimensions: it must be a positive even number"
            )
        scaling = section.rope.scaling
        if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
            yield (
                f"model.{kind.value}.rope.scaling.low_freq_factor ({scaling.low_freq_factor}) must be less than "
                f"high_freq_factor ({scaling.high_freq_factor})"
            )


def attention_kinds(model: ModelConfig) -> set[AttentionKind]:
    """The kinds of attention that occur in a model with a readable layout."""
    pattern, _ = parse_layout(model.layout)
    kinds = {AttentionKind.FULL, *pattern[: model.num_layers - 1]}
    return kinds | {AttentionKind.SLIDING} if model.mtp.depths else kinds


def _layers(model: ModelConfig) -> Iterator[str]:
    if model.num_dense_layers > model.num_layers:
        yield f"model.num_dense_layers ({model.num_dense_layers}) must not exceed model.num_layers ({model.num_layers})"
    for name, limits in (("routed", model.clamp.routed), ("shared", model.clamp.shared)):
        for layer in limits:
            if not 0 <= layer < model.num_layers:
                yield (
                    f"model.clamp.{name} names layer {layer}, but model.num_layers is {model.num_layers}: "
                    f"layers are numbered 0 to {model.num_layers - 1}"
                )
            elif name == "routed" and layer < model.num_dense_layers:
                yield (
                    f"model.clamp.routed names layer {layer}, which is dense (model.num_dense_layers is "
                    f"{model.num_dense_layers}) and has no routed experts: MoE layers are "
                    f"{_range(model.num_dense_layers, model.num_layers)}; limits of dense layers stand in "
                    "model.clamp.shared"
                )


def _range(start: int, stop: int) -> str:
    return f"{start} to {stop - 1}" if start < stop else "none"


def _has_experts(model: ModelConfig) -> bool:
    return model.num_dense_layers < model.num_layers


def _experts(config: PretrainConfig) -> Iterator[str]:
    model, moe, expert = config.model, config.model.moe, config.parallel.expert
    if not _has_experts(model):
        if expert > 1:
            yield (
                f"parallel.expert is {expert}, but the model has no MoE layer (model.num_dense_layers is "
                f"{model.num_dense_layers} of {model.num_layers}): it must be 1"
            )
        return
    if moe.top_k > moe.num_experts:
        yield f"model.moe.top_k ({moe.top_k}) must not exceed model.moe.num_experts ({moe.num_experts})"
    if moe.num_experts % expert:
        yield (
            f"model.moe.num_experts ({moe.num_experts}) must be a multiple of parallel.expert ({expert}): "
            f"parallel.expert can be {_divisors(moe.num_experts)}"
        )
    multiple = _ROW_MULTIPLE[config.train.precision]
    for name, width in (
        ("model.hidden_size", model.hidden_size),
        ("model.moe.expert_hidden_size", moe.expert_hidden_size),
    ):
        if width % multiple:
            yield (
                f"{name} ({width}) must be a multiple of {multiple} with train.precision {config.train.precision}: "
                "the grouped matrix product of the experts needs rows of a multiple of 16 bytes"
            )


def _divisors(number: int) -> str:
    return _listed(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)


def _balance(config: PretrainConfig) -> Iterator[str]:
    balance, model = config.balance, config.model
    groups, bias = balance.ep_groups, balance.bias
    if not _has_experts(model):
        asked = {
            "ep_groups": groups is not None,
            "freeze_router": balance.freeze_router,
            "ep_loss_coefficient": _asked(balance, "ep_loss_coefficient"),
            "bias.rate": _asked(bias, "rate"),
            "bias.decay_steps": bias.decay_steps is not None,
        }
        for name in asked:
            if asked[name]:
                yield (
                    f"balance.{name} is set, but the model has no MoE layer (model.num_dense_layers is "
                    f"{model.num_dense_layers} of {model.num_layers}): leave it out"
                )
    elif groups is not None and model.moe.num_experts % groups:
        yield (
            f"balance.ep_groups ({groups}) must divide model.moe.num_experts ({model.moe.num_experts}): "
            f"it can be {_divisors(model.moe.num_experts)}"
        )
    elif (groups or config.parallel.expert) == 1 and (
        _asked(balance, "ep_loss_coefficient") or (groups and balance.ep_loss_coefficient > 0)
    ):
        yield (
            f"balance.ep_loss_coefficient is {balance.ep_loss_coefficient}, but the balance loss of a single group is "
            f"constant (balance.ep_groups is {_or_unset(groups)} and parallel.expert {config.parallel.expert}): take "
            f"more groups (balance.ep_groups can be {_divisors(model.moe.num_experts)}) or the coefficient 0"
        )
    if (bias.decay_start_step is None) != (bias.decay_steps is None):
        yield (
            "balance.bias.decay_start_step and balance.bias.decay_steps belong together: set both or neither "
            f"(they are {_or_unset(bias.decay_start_step)} and {_or_unset(bias.decay_steps)})"
        )
    if bias.final_rate is not None and bias.decay_steps is not None:
        yield (
            f"balance.bias.final_rate ({bias.final_rate}) and balance.bias.decay_steps ({bias.decay_steps}) are two "
            "ways to decay: set one"
        )
    if bias.rate == 0 and bias.decay_steps is not None:
        yield "balance.bias.decay_steps is set, but balance.bias.rate is 0: there is nothing to decay, leave it out"
    if balance.freeze_router and bias.rate > 0:
        yield (
            f"balance.freeze_router keeps the selection biases as they are, but balance.bias.rate is {bias.rate}: "
            "set the rate to 0 or leave it out"
        )
    if balance.freeze_router and balance.ep_loss_coefficient > 0:
        yield (
            f"balance.freeze_router keeps the router as it is, but balance.ep_loss_coefficient is "
            f"{balance.ep_loss_coefficient}, which would push the hidden states instead: set it to 0 or leave it out"
        )


def _asked(section: Section, weight: str) -> bool:
    """Whether a weight is above 0 and not the default, which must be good for models that have no use for it."""
    return bool(getattr(section, weight) not in (0, type(section).model_fields[weight].default))


def _or_unset(value: int | None) -> str:
    return "unset" if value is None else str(value)


def _metadata(config: PretrainConfig) -> Iterator[str]:
    if config.data.metadata_in_loss_tokens is not None and config.data.metadata != "in_loss":
        yield (
            f"data.metadata_in_loss_tokens ({config.data.metadata_in_loss_tokens}) says until when metadata are in the "
            f"loss, but data.metadata is {config.data.metadata}: leave it out"
        )


def _freezing(config: PretrainConfig) -> Iterator[str]:
    if not config.train.freeze_backbone:
        return
    if config.loss.mtp_train_depths == 0:
        yield "train.freeze_backbone leaves MTP alone to train, but loss.mtp_train_depths is 0: nothing would train"
    if not config.balance.freeze_router:
        yield "train.freeze_backbone keeps routers and their biases as they are: set balance.freeze_router to true too"
    if config.optimizer.weight_clipping.threshold is not None:
        yield "train.freeze_backbone keeps experts as they are, but optimizer.weight_clipping.threshold would clip them"


def _loss(config: PretrainConfig) -> Iterator[str]:
    trained, depths = config.loss.mtp_train_depths, config.model.mtp.depths
    if trained > depths:
        yield f"loss.mtp_train_depths ({trained}) must not exceed model.mtp.depths ({depths})"
    for name in ("chain", "head"):
        if not depths and getattr(config.model.mtp, name) != MtpConfig.model_fields[name].default:
            yield f"model.mtp.{name} is set, but model.mtp.depths is 0: leave it out"
    if not trained and config.loss.mtp_weight != LossConfig.model_fields["mtp_weight"].default:
        yield "loss.mtp_weight is set, but loss.mtp_train_depths is 0, so that no MTP loss exists: leave it out"
    if config.data.sequence_length <= trained:
        yield (
            f"data.sequence_length ({config.data.sequence_length}) must be greater than loss.mtp_train_depths "
            f"({trained}): the furthest depth predicts {trained + 1} tokens ahead and would have no target"
        )


# --------------------------------------------------------------------------------------- parallel


def _parallel(config: PretrainConfig, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    yield from _stages(config.model, parallel)
    yield from _tensor(config.model, parallel.tensor)
    yield from _sequence(config)
    dense = parallel.pipeline * parallel.tensor * parallel.context
    if world_size < 1 or world_size % dense:
        yield (
            f"the number of processes ({world_size}) must be a multiple of parallel.pipeline x tensor x context "
            f"({parallel.pipeline} x {parallel.tensor} x {parallel.context} = {dense})"
        )
    elif world_size // parallel.pipeline % parallel.expert:
        yield (
            f"the number of processes ({world_size}) over parallel.pipeline ({parallel.pipeline}) leaves "
            f"{world_size // parallel.pipeline} per stage, which must be a multiple of parallel.expert "
            f"({parallel.expert}): take a multiple of {smallest_world_size(parallel)} processes"
        )
    else:
        yield from _nodes(parallel, world_size)


def _stages(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    stages = parallel.pipeline * parallel.virtual_pipeline
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"parallel.virtual_pipeline is {parallel.virtual_pipeline}, but parallel.pipeline is 1: stages are "
            "interleaved over at least 2 pipeline ranks; set parallel.virtual_pipeline to 1 or parallel.pipeline to 2 "
            "or more"
        )
    elif parallel.pipeline_layout is not None and stages == 1:
        yield (
            "parallel.pipeline_layout is set, but there is one stage (parallel.pipeline and virtual_pipeline are 1): "
            "leave it out"
        )
    elif parallel.pipeline_layout is not None:
        try:
            parse_pipeline_layout(parallel.pipeline_layout, stages, model.num_layers, model.mtp.depths)
        except ValueError as error:
            yield str(error)
    elif stages > model.num_layers:
        yield (
            f"parallel.pipeline x virtual_pipeline ({parallel.pipeline} x {parallel.virtual_pipeline} = {stages}) must "
            f"not exceed model.num_layers ({model.num_layers}): each stage holds at least one layer, unless "
            "parallel.pipeline_layout leaves some empty"
        )


def _tensor(model: ModelConfig, tensor: int) -> Iterator[str]:
    """What tensor-parallel ranks cut must divide."""
    if tensor == 1:
        return
    if model.vocab_size <= (tensor - 1) * -(-model.vocab_size // tensor):
        yield (
            f"model.vocab_size ({model.vocab_size}) is too small for parallel.tensor ({tensor}): in parts of "
            f"{-(-model.vocab_size // tensor)} rows nothing is left for the last rank"
        )
    cut = {}
    groups = {}
    try:
        _, options = parse_layout(model.layout)
    except ValueError:
        return  # the layout was refused already
    for kind in sorted(attention_kinds(model), key=lambda kind: kind.value):
        section = model.sliding if kind is AttentionKind.SLIDING else model.full
        owner = "sliding" if kind is AttentionKind.SLIDING and "heads" in options else "full"
        cut[f"model.{owner}.num_heads"] = getattr(model, owner).num_heads
        groups[f"model.{kind.value}.num_kv_groups"] = section.num_kv_groups
    if model.num_dense_layers or model.mtp.depths:
        cut["model.dense_hidden_size"] = model.dense_hidden_size
    if _has_experts(model):
        cut["model.moe.shared_hidden_size"] = model.moe.shared_hidden_size
    possible = _divisors(math.gcd(*cut.values(), *groups.values()))
    for name, size in (cut | groups).items():
        if size % tensor:
            why = "; more tensor-parallel ranks than KV groups are not supported" if name in groups else ""
            yield (
                f"{name} ({size}) must be a multiple of parallel.tensor ({tensor}){why}: "
                f"parallel.tensor can be {possible}"
            )


def _sequence(config: PretrainConfig) -> Iterator[str]:
    parallel, length = config.parallel, config.data.sequence_length
    if parallel.context > 1:
        # Each rank holds two chunks, one from either end (steptron.parallel.sequence_shard), and its tensor-parallel
        # ranks equal runs of them.
        chunks, runs = 2 * parallel.context, parallel.context * parallel.tensor
        unit = math.lcm(chunks, runs)
        why = f"of 2 x parallel.context ({chunks}) and of parallel.context x tensor ({runs})"
    else:
        unit, why = parallel.tensor, "parallel.tensor"
    if length % unit:
        yield (
            f"data.sequence_length ({length}) must be a multiple of {unit} ({why}), so that every rank holds equally "
            "many tokens"
        )


def _nodes(parallel: ParallelConfig, world_size: int) -> Iterator[str]:
    """Nodes must share the ranks that add up a gradient evenly; a single node has nothing to share."""
    size = parallel.node_size
    if size is None or size >= world_size or _nodes_share_evenly(parallel, world_size, size):
        return
    divisors = [number for number in range(1, world_size + 1) if world_size % number == 0]
    possible = _listed(number for number in divisors if _nodes_share_evenly(parallel, world_size, number))
    why = (
        f"nodes would hold different numbers of the ranks that add up a gradient (over {parallel.pipeline} pipeline x "
        f"{parallel.tensor} tensor x {parallel.context} context x {parallel.expert} expert ranks)"
        if world_size % size == 0
        else f"it must divide the number of processes ({world_size})"
    )
    yield f"parallel.node_size is {size}, but {why}: it can be {possible}, or unset"


def _nodes_share_evenly(parallel: ParallelConfig, world_size: int, node_size: int) -> bool:
    """Whether, of each group of ranks that hold the same parameters, every node has equally many or none.

    Within a stage's run of ranks the tensor-parallel rank changes fastest, and in the experts' layout the
    expert-parallel rank: ranks that hold the same parameters are 1, tensor or expert ranks apart.
    """
    stage_size = world_size // parallel.pipeline
    if world_size % node_size or (stage_size % node_size and node_size % stage_size):
        return False
    # On one node; or every node has node_size / distance of a group, or at most one.
    return node_size >= stage_size or all(
        node_size <= distance or node_size % distance == 0 for distance in (parallel.tensor, parallel.expert)
    )


def _expert_communication(config: PretrainConfig, device: str) -> Iterator[str]:
    """What needs GPUs, or packages for them; which packages other machines have is not known here."""
    parallel, train = config.parallel, config.train
    on_gpu = train.device != "cpu" and (device == "cuda" or (device == "auto" and _has_cuda()))
    here = "train.device is cpu" if train.device == "cpu" else "there is no CUDA device here"
    if parallel.overlap_expert_communication and parallel.expert == 1:
        yield (
            "parallel.overlap_expert_communication is true, but parallel.expert is 1, so that no token travels: "
            "set it to false"
        )
    elif parallel.overlap_expert_communication and not on_gpu:
        yield (
            "parallel.overlap_expert_communication is true, which needs the streams of a GPU, but "
            f"{here}: set it to false"
        )
    elif parallel.overlap_expert_communication and parallel.dispatcher == "allgather" and parallel.tensor > 1:
        yield (
            f"parallel.overlap_expert_communication is true with parallel.dispatcher allgather and parallel.tensor "
            f"{parallel.tensor}: in Megatron-Core the dispatcher and the gathers of the shared expert use the same "
            "buffer and cannot run side by side; set the dispatcher to alltoall, or the overlap to false"
        )
    if parallel.dispatcher != "flex":
        return
    instead = "set it to alltoall or allgather"
    if parallel.expert == 1:
        yield f"parallel.dispatcher is flex, but parallel.expert is 1, so that no token travels: {instead}"
    elif not on_gpu:
        yield f"parallel.dispatcher is flex, which is DeepEP's, for GPUs, but {here}: {instead}"
    else:
        yield from _deep_ep(config, look_for_package=device != "cuda", instead=instead)


def _deep_ep(config: PretrainConfig, look_for_package: bool, instead: str) -> Iterator[str]:
    expert, hidden = config.parallel.expert, config.model.hidden_size
    if look_for_package and not _installed("deep_ep"):
        yield (
            "parallel.dispatcher is flex, but DeepEP (package deep_ep, https://github.com/deepseek-ai/DeepEP) is not "
            f"installed: install it, or {instead}"
        )
    if config.train.precision != "bf16":
        yield (
            f"parallel.dispatcher is flex, and DeepEP carries bf16 only, but train.precision is "
            f"{config.train.precision}: set it to bf16, or the dispatcher to alltoall or allgather"
        )
    if expert not in _DEEP_EP_RANKS:
        yield (
            f"parallel.dispatcher is flex, and DeepEP has no configuration for parallel.expert {expert}: it can be "
            f"{_listed(_DEEP_EP_RANKS)}"
        )
    if expert > _DEEP_EP_NODE and hidden % _DEEP_EP_HIDDEN_MULTIPLE:
        yield (
            f"model.hidden_size ({hidden}) must be a multiple of {_DEEP_EP_HIDDEN_MULTIPLE} with parallel.dispatcher "
            f"flex over more than {_DEEP_EP_NODE} ranks (parallel.expert is {expert})"
        )


def _batch(config: PretrainConfig, world_size: int) -> Iterator[str]:
    train = config.train
    ramp = train.batch_ramp
    if ramp is not None:
        if ramp.start > train.global_batch_size:
            yield (
                f"train.batch_ramp.start ({ramp.start}) must not exceed train.global_batch_size "
                f"({train.global_batch_size})"
            )
        elif (train.global_batch_size - ramp.start) % ramp.increment:
            yield (
                f"train.batch_ramp.increment ({ramp.increment}) must divide the way from train.batch_ramp.start "
                f"({ramp.start}) to train.global_batch_size ({train.global_batch_size}), which is "
                f"{train.global_batch_size - ramp.start}"
            )
    data_parallel = data_parallel_size(config.parallel, world_size)
    unit = train.micro_batch_size * data_parallel
    factors, product = "train.micro_batch_size x data-parallel ranks", f"{train.micro_batch_size} x {data_parallel}"
    why = ""
    if config.parallel.virtual_pipeline > 1:
        # Megatron-Core's interleaved schedule refuses a last group of fewer micro-batches than pipeline ranks.
        unit *= config.parallel.pipeline
        factors, product = f"{factors} x parallel.pipeline", f"{product} x {config.parallel.pipeline}"
        why = ": with parallel.virtual_pipeline above 1 micro-batches pass in groups of parallel.pipeline"
    if unit < 1:
        return  # the number of processes was refused already
    sizes = {"train.global_batch_size": train.global_batch_size}
    if ramp is not None:
        sizes |= {"train.batch_ramp.start": ramp.start, "train.batch_ramp.increment": ramp.increment}
    for name, size in sizes.items():
        if size % unit:
            yield f"{name} ({size}) must be a multiple of {factors} ({product} = {unit}){why}"


# --------------------------------------------------------------------------------------- training


def _optimizer(config: PretrainConfig) -> Iterator[str]:
    optimizer, model = config.optimizer, config.model
    if optimizer.name == "sgd":
        for name in ("beta1", "beta2", "eps"):
            if _is_set(optimizer, name):
                yield f"optimizer.{name} is set, but optimizer.name is sgd, which has no moments: leave it out"
    if optimizer.name != "muon":
        for name in _set_below(optimizer.muon):
            yield f"optimizer.muon.{name} is set, but optimizer.name is {optimizer.name}: leave it out"
    elif optimizer.muon.diagnostics.every_steps is None and _is_set(optimizer.muon.diagnostics, "sample"):
        yield (
            "optimizer.muon.diagnostics.sample is set, but without optimizer.muon.diagnostics.every_steps nothing is "
            "recorded: set that too, or leave it out"
        )
    sharding = optimizer.sharding
    if sharding.reduction != "auto" and _is_set(sharding, "max_padding"):
        yield (
            f"optimizer.sharding.max_padding is set, but optimizer.sharding.reduction is {sharding.reduction}, which "
            "takes any padding: leave it out, or set the reduction to auto"
        )
    if optimizer.weight_clipping.threshold is not None and not _has_experts(model):
        yield (
            f"optimizer.weight_clipping.threshold is set, but the model has no MoE layer (model.num_dense_layers is "
            f"{model.num_dense_layers} of {model.num_layers}): leave it out"
        )
    if not any(_attention(model)):  # without attention there are no parameters to name, and it is refused already
        yield from _roles(config)


def _roles(config: PretrainConfig) -> Iterator[str]:
    """What ``optimizer.roles`` says must name parameters that the run trains, and be possible for them."""
    optimizer = config.optimizer
    parameters = trained_parameters(config)
    trained = {matrix.role for parameter in parameters for matrix in parameter.matrices}
    for name, own in optimizer.roles.items():
        field = f"optimizer.roles.{name}"
        if name not in {role.value for role in TRAINED_ROLES}:
            yield f"{field}: no parameter has this role; roles are {_listed(TRAINED_ROLES)}"
            continue
        role = ParameterRole(name)
        if role not in trained:
            frozen = role is ParameterRole.ROUTER and config.balance.freeze_router
            why = "balance.freeze_router keeps the router as it is" if frozen else "the run trains no such parameter"
            yield f"{field} is set, but {why}: leave it out"
        if own.optimizer is not None and optimizer.name != "muon":
            yield (
                f"{field}.optimizer is {own.optimizer}, but optimizer.name is {optimizer.name}, which takes all "
                "parameters: leave it out, or set the name to muon"
            )
        elif own.optimizer == "muon" and role not in ORTHOGONALISABLE:
            possible = [role for role in TRAINED_ROLES if role in ORTHOGONALISABLE]
            yield f"{field}.optimizer is muon, which takes matrices of features ({_listed(possible)}): leave it out"
        if own.decay and optimizer.weight_decay == 0:
            yield f"{field}.decay is true, but optimizer.weight_decay is 0: leave it out, or set that"


def _is_set(section: Section, name: str) -> bool:
    """Whether a value is not the default."""
    return bool(getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True))


def _set_below(section: Section) -> Iterator[str]:
    """Names of the values of a section, and of sections inside it, that are not the default."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from (f"{name}.{inner}" for inner in _set_below(value))
        elif _is_set(section, name):
            yield name


def _schedule(config: PretrainConfig) -> Iterator[str]:
    optimizer, schedule, steps = config.optimizer, config.optimizer.schedule, config.train.steps
    if schedule.warmup_steps >= steps:
        yield f"optimizer.schedule.warmup_steps ({schedule.warmup_steps}) must be less than train.steps ({steps})"
    if schedule.warmup_steps and schedule.warmup_fraction:
        yield (
            f"optimizer.schedule.warmup_steps ({schedule.warmup_steps}) and warmup_fraction "
            f"({schedule.warmup_fraction}) say the same: set one"
        )
    if schedule.kind == "cosine" and schedule.min_lr > optimizer.lr:
        yield f"optimizer.schedule.min_lr ({schedule.min_lr}) must not exceed optimizer.lr ({optimizer.lr})"
    if schedule.kind != "cosine" and schedule.min_lr > 0:
        yield (
            f"optimizer.schedule.min_lr ({schedule.min_lr}) is the end of the cosine, but optimizer.schedule.kind is "
            f"{schedule.kind}: leave it out"
        )
    if schedule.kind != "staged" and schedule.segments:
        yield (
            f"optimizer.schedule.segments belongs to kind staged, but optimizer.schedule.kind is {schedule.kind}: "
            "leave it out or set the kind to staged"
        )
    if schedule.kind == "staged":
        covered = warmup_steps(schedule, steps) + sum(segment.steps for segment in schedule.segments)
        if not schedule.segments:
            yield "optimizer.schedule.segments is empty: kind staged needs at least one segment"
        elif covered < steps:
            yield (
                f"optimizer.schedule: warmup_steps and segments cover {covered} steps, but train.steps is {steps}: "
                "lengthen the segments or add one"
            )


def _recompute(config: PretrainConfig) -> Iterator[str]:
    if not config.train.recompute or any(_attention(config.model)):
        return  # without attention there is no layer to name, and it is refused already
    spec = model_spec(config.model)
    trained = config.loss.mtp_train_depths
    layers = [layer.named for layer in (*spec.layers, *(depth.layer for depth in spec.mtp[:trained]))]
    for index, rule in enumerate(config.train.recompute):
        field = f"train.recompute.{index}"
        if twice := sorted({part for part in rule.parts if rule.parts.count(part) > 1}):
            yield f"{field}.parts names {', '.join(twice)} twice: once is enough, or another part was meant"
        try:
            selectors = parse_layers(rule.layers)
        except ValueError as error:
            yield f"{field}.layers: {error}"
            continue
        empty = False
        for selector in selectors:
            if selector.last is not None and selector.last >= config.model.num_layers:
                empty = True
                yield (
                    f"{field}.layers ({rule.layers}) names layer {selector.last}, but model.num_layers is "
                    f"{config.model.num_layers}: decoder layers are numbered 0 to {config.model.num_layers - 1}, "
                    "and MTP depths are named by mtp"
                )
            elif not any(selector.names(layer) for layer in layers):
                empty = True
                yield (
                    f"{field}.layers ({rule.layers}) names {selector.text} layers, but the model trains none "
                    f"(model.layout is {config.model.layout}, model.num_dense_layers {config.model.num_dense_layers} "
                    f"of {config.model.num_layers}, loss.mtp_train_depths {trained}): leave it out"
                )
        named = [layer for layer in layers if any(selector.names(layer) for selector in selectors)]
        if not empty and "moe_permutation" in rule.parts and not any(layer.moe for layer in named):
            yield (
                f"{field}.parts has moe_permutation, but {field}.layers ({rule.layers}) names no MoE layer: MoE layers "
                f"are {_range(config.model.num_dense_layers, config.model.num_layers)}"
            )


def _machine(train: TrainConfig, device: str) -> Iterator[str]:
    if train.device == "cuda" and device != "cuda" and (device == "cpu" or not _has_cuda()):
        yield "train.device is cuda, but there is no CUDA device here: set it to cpu or auto"
    if train.logging.tensorboard and not _installed("tensorboard"):
        yield (
            "train.logging.tensorboard is true, but TensorBoard is not installed: "
            "`pip install tensorboard`, or set it to false"
        )
    if train.logging.wandb_project is not None and not _installed("wandb"):
        yield (
            f"train.logging.wandb_project is {train.logging.wandb_project!r}, but Weights & Biases is not installed: "
            "`pip install wandb`, or set it to null"
        )


def _kernels(train: TrainConfig, parallel: ParallelConfig, device: str) -> Iterator[str]:
    asked = [f"train.{name} is {value}" for name, value in (("kernels", train.kernels), ("products", train.products))]
    for text, explicit in zip(asked, (train.kernels == "native", train.products == "bf16"), strict=True):
        if explicit and train.precision != "fp32":
            yield f"{text}, which is for train.precision fp32 (it is {train.precision}): set it to auto"
        elif explicit and train.device != "cpu" and (train.device == "cuda" or device == "cuda" or _has_cuda()):
            yield f"{text}, which is for CPUs, but the run is on a GPU: set it to auto, or train.device to cpu"
    on_cpu = train.precision == "fp32" and (train.device == "cpu" or (device != "cuda" and not _has_cuda()))
    explicit = train.kernels == "native" or train.products == "bf16"
    if explicit and on_cpu and (reason := why_unfit()) is not None:
        yield f"{asked[0] if train.kernels == 'native' else asked[1]}, but {reason}"
    if train.products == "bf16" and parallel.tensor > 1:
        yield (
            f"train.products is bf16, but with parallel.tensor {parallel.tensor} linear layers are Megatron-Core's, "
            "whose products are fp32: set it to fp32 or auto"
        )
    if train.products == "bf16" and train.kernels == "plain":
        yield "train.products is bf16, which needs the native kernels, but train.kernels is plain: set one to auto"
    elif train.products == "bf16" and train.precision == "fp32" and not has_fast_bf16():
        yield "train.products is bf16, but this processor has neither AVX512-BF16 nor AMX: set it to fp32 or auto"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _output(output: Path) -> Iterator[str]:
    try:
        existing = next(path for path in (output, *output.absolute().parents) if path.exists())
    except OSError as error:
        yield f"train.output ({output}) cannot be used: {error.strerror}"
        return
    if not existing.is_dir():
        yield f"train.output ({output}) cannot be a folder: {existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"train.output ({output}) cannot be written: no permission to write in {existing}"


def _faults(config: PretrainConfig) -> Iterator[str]:
    timeout, hang_after = config.parallel.timeout_seconds, config.train.faults.hang_after_seconds
    if hang_after is not None and hang_after >= timeout:
        yield (
            f"train.faults.hang_after_seconds ({hang_after:g}) must be less than parallel.timeout_seconds ({timeout}), "
            "after which a process that waits gives up, and nobody would know for whom"
        )


def _missing_weights(config: PretrainConfig) -> Iterator[str]:
    """What is to fill open places needs such places."""
    missing, model = config.train.initial_weights_missing, config.model
    absent = {
        "mtp": "model.mtp.depths is 0" if model.mtp.depths == 0 else None,
        "value_head": None if model.value_head else "model.value_head is false",
    }
    for name, why in absent.items():
        if _is_set(missing, name):
            why = "train.initial_weights is not" if config.train.initial_weights is None else why
            if why is not None:
                yield f"train.initial_weights_missing.{name} is set, but {why}: leave it out"


def _index_cache(folder: Path | None) -> Iterator[str]:
    # It need not be writable: a run whose orders are all there only reads them.
    if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        yield f"data.index_cache ({folder}) is not a folder: name one, which is made where it does not exist"


def _packing(data: DataConfig) -> Iterator[str]:
    if data.packing == "best_fit" and data.document_attention == "crossing":
        yield (
            f"data.packing is {data.packing}, whose documents have nothing to do with each other, but "
            "data.document_attention is crossing: set it to isolated, or data.packing to stream"
        )


def _telemetry(telemetry: TelemetryConfig) -> Iterator[str]:
    for field, names in (("every_steps", telemetry.every_steps), ("keep", telemetry.keep)):
        for name in names:
            known = name in DEFAULTS or (field == "every_steps" and _is_of_a_role(name))
            if not known:
                yield f"telemetry.{field}.{name}: no such quantity; there are {', '.join(sorted(DEFAULTS))}"
            elif field == "keep" and DEFAULTS[name].keep is None:
                kept = ", ".join(name for name, quantity in DEFAULTS.items() if quantity.keep is not None)
                yield f"telemetry.keep.{name}: it is not measured in every micro-batch; those that are: {kept}"
    if telemetry.server is None:
        return
    match = re.fullmatch(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", telemetry.server)
    if match is None or not 0 < int(match[1]) < 65_536:
        yield f"telemetry.server ({telemetry.server}) must be host:port, such as localhost:7077"
    if importlib.util.find_spec("grpc") is None:
        yield "telemetry.server needs grpcio: `pip install 'steptron[metrics]'`, or leave telemetry.server unset"
    if telemetry.certificate is not None and not telemetry.certificate.is_file():
        yield f"telemetry.certificate: there is no file {telemetry.certificate}"


def _is_of_a_role(name: str) -> bool:
    metric, _, role = name.rpartition(".")
    return metric in DEFAULTS and role in {own.value for own in ParameterRole} and not metric.startswith("moe.")


def _data_folders(config: PretrainConfig) -> Iterator[str]:
    weights = config.train.initial_weights
    if weights is not None and not os.path.isdir(weights):
        yield (
            f"train.initial_weights ({weights}) is not a folder: it takes a checkpoint, a run's folder or a released "
            "model's folder"
        )
    for split in ("train", "validation"):
        for index, dataset in enumerate(getattr(config.data, split)):
            if not os.path.isdir(dataset.path):  # Path.is_dir raises for some names, such as too long ones
                what = "is not a folder" if os.path.exists(dataset.path) else "does not exist"
                yield (
                    f"data.{split}.{index}.path ({dataset.path}) {what}: write it with `steptron data build` "
                    "(the path is relative to the current working directory)"
                )
