"""The keys of a released config.json that a model decides, and what of a model they cannot express."""

from __future__ import annotations

from collections.abc import Mapping

from steptron.checkpoint.released.config_format import DTYPE_NAMES, KIND_NAMES, NO_BASE, ONLY
from steptron.checkpoint.released.names import Precision
from steptron.checkpoint.released.transformers_config import RENAMED, RESHAPED
from steptron.config.layout import AttentionKind, parse_layout
from steptron.config.schema import ModelConfig
from steptron.model.layer_spec import ModelSpec, RopeScaling


def inexpressible(model: ModelConfig) -> list[str]:
    """Options that no key of the release stands for."""
    problems = []
    if "+sink" in model.layout:
        problems.append(f"model.layout ({model.layout}) has +sink: the release has no tensors for attention sinks")
    if model.value_head:
        problems.append("model.value_head is true: the release has no tensor for a value head")
    if model.mtp.chain != "pre_norm":
        problems.append(
            f"model.mtp.chain is {model.mtp.chain}: the release's is pre_norm, and config.json has no key for it"
        )
    if model.clamp.position != "after_silu":
        problems.append(
            f"model.clamp.position is {model.clamp.position}: the release's is after_silu, and config.json has no key "
            "for it"
        )
    return problems


def wrong_clamps(model: ModelConfig) -> list[str]:
    """Limits of layers that do not have what is limited; the arrays would have no place for them."""
    problems = []
    for name, limits, first in (
        ("routed", model.clamp.routed, model.num_dense_layers),
        ("shared", model.clamp.shared, 0),
    ):
        if wrong := [layer for layer in limits if not first <= layer < model.num_layers]:
            problems.append(
                f"model.clamp.{name} names layer {', '.join(map(str, wrong))}: it must name layers from {first} to "
                f"{model.num_layers - 1}"
            )
    return problems


def wrong_scaling(spec: ModelSpec) -> list[str]:
    scalings = {scaling for scaling in _scaling_by_kind(spec).values() if scaling is not None}
    if len(scalings) < 2:
        return []
    return [
        "model.full.rope.scaling and model.sliding.rope.scaling differ: config.json has one rope_scaling, for full "
        "layers, sliding layers or both"
    ]


def _scaling_by_kind(spec: ModelSpec) -> dict[AttentionKind, RopeScaling | None]:
    """The scaling of the kinds that the model has."""
    layers = [*spec.layers, *(depth.layer for depth in spec.mtp)]
    return {layer.attention.kind: layer.attention.rope.scaling for layer in layers}


def model_keys(model: ModelConfig, spec: ModelSpec, precision: Precision) -> dict[str, object]:
    """Every key that the model decides, in the release's form."""
    _, options = parse_layout(model.layout)
    layers = [*spec.layers, *(depth.layer for depth in spec.mtp)]
    kinds = [layer.attention.kind for layer in layers]
    ropes = [model.full.rope if kind is AttentionKind.FULL else model.sliding.rope for kind in kinds]
    scalings = {kind: scaling for kind, scaling in _scaling_by_kind(spec).items() if scaling is not None}
    moe_layers = range(model.num_dense_layers, model.num_layers)
    written: dict[str, object] = {
        **{key: value for key, (value, _) in ONLY.items()},
        "torch_dtype": DTYPE_NAMES[precision],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.dense_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_nextn_predict_layers": model.mtp.depths,
        "num_attention_heads": model.full.num_heads,
        "num_attention_groups": model.full.num_kv_groups,
        "head_dim": model.head_dim,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": model.sliding.num_heads if "heads" in options else model.full.num_heads,
            "num_attention_groups": model.sliding.num_kv_groups,
            "head_dim": model.head_dim,
            "true_head_dim": model.head_dim,
        },
        "layer_types": [KIND_NAMES[kind] for kind in kinds],
        "sliding_window": model.sliding.window,
        "use_head_wise_attn_gate": "gate" in options,
        "rope_theta": [rope.theta for rope in ropes],
        "partial_rotary_factors": [rope.rotary_fraction for rope in ropes],
        "rope_scaling": _written_scaling(next(iter(scalings.values()), None)),
        "use_rope_layers": [],
        "use_moe": bool(moe_layers),
        "moe_layers_enum": ",".join(map(str, moe_layers)),
        "moe_layer_offset": 0,
        "moe_every_n_layer": 1,
        "moe_num_experts": model.moe.num_experts,
        "moe_top_k": model.moe.top_k,
        "moe_intermediate_size": model.moe.expert_hidden_size,
        "share_expert_dim": model.moe.shared_hidden_size,
        "moe_router_scaling_factor": model.moe.scaling_factor,
        "swiglu_limits": [model.clamp.routed.get(index, 0.0) for index in range(len(layers))],
        "swiglu_limits_shared": [model.clamp.shared.get(index, 0.0) for index in range(len(layers))],
    }
    if scalings:  # without scaling the key says nothing about the model
        written["yarn_only_types"] = [KIND_NAMES[kind] for kind in scalings]
    return written


def _written_scaling(scaling: RopeScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
    }


def over_base(written: Mapping[str, object], base: Mapping[str, object]) -> dict[str, object]:
    """``written``, in the order of ``base`` and with what it says about other things than the model."""
    kept = {key: value for key, value in base.items() if key not in (*RENAMED, *RESHAPED)}
    # An equal number stays as it is in the base: 7 is 7.0.
    own = {key: base[key] if key in base and base[key] == value else value for key, value in written.items()}
    return {**kept, **{key: value for key, value in NO_BASE.items() if key not in kept}, **own}
