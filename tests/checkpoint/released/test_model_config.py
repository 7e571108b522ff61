from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.checkpoint.released.model_config import read_model_config, read_precision, write_model_config
from steptron.checkpoint.released.transformers_config import RENAMED, RESHAPED
from steptron.config.schema import ModelConfig
from steptron.errors import ConfigError
from steptron.model.layer_spec import AttentionKind, DenseFfnSpec, MoeFfnSpec, model_spec
from tests.config.test_presets import MODELS, model

TINY = Path(__file__).parents[2] / "data" / "step3p5" / "tiny"

Json = dict[str, Any]

# The release's config.json, all 45 keys, written out from its description and not by the code under test.
RELEASE: Json = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "auto_map": {
        "AutoConfig": "configuration_step3p5.Step3p5Config",
        "AutoModelForCausalLM": "modeling_step3p5.Step3p5ForCausalLM",
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 128896,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "max_seq_len": 262144,
    "max_position_embeddings": 262144,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
        "true_head_dim": 128,
    },
    "att_impl_type": "GQA",
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 12,
    "sliding_window": 512,
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "sink": False,
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 131072,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "use_rope_layers": [],
    "use_moe": True,
    "moe_layers_enum": "3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36,"
    "37,38,39,40,41,42,43,44",
    "moe_layer_offset": 0,
    "moe_every_n_layer": 1,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "swiglu_limits": [0.0] * 43 + [7, 7] + [0.0] * 3,
    "swiglu_limits_shared": [0.0] * 44 + [16] + [0.0] * 3,
    "zero_centered": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": [1, 2, 128007],
}


def tiny() -> Json:
    """The tiny case's file: 9 layers and 3 MTP depths."""
    content: Json = json.loads((TINY / "config.json").read_text())
    return content


def same_json(one: object, other: object) -> bool:
    """Equality that tells 7 from 7.0 and 1 from true."""
    return json.dumps(one) == json.dumps(other)


def problems_of(raw: Json) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_model_config(raw, "config.json")
    assert caught.value.title == "config.json"
    return caught.value.problems


# -------------------------------------------------------------------------------------- round trips


def test_the_release_is_the_preset_and_is_written_as_it_was(tmp_path: Path) -> None:
    assert len(RELEASE) == 45
    read = read_model_config(RELEASE, "config.json")
    assert read == model("step3p5-flash", tmp_path)
    assert read_precision(RELEASE, "config.json") == "bf16"
    assert same_json(write_model_config(read, "bf16", base=RELEASE), RELEASE)


def test_the_release_can_be_written_from_the_preset_alone(tmp_path: Path) -> None:
    written = write_model_config(
        model("step3p5-flash", tmp_path),
        "bf16",
        bos_token_id=0,
        eos_token_id=(1, 2, 128007),
        max_position_embeddings=262144,
    )
    assert written == {key: value for key, value in RELEASE.items() if key != "auto_map"}
    assert json.loads(json.dumps(written)) == written


def test_the_tiny_case(tmp_path: Path) -> None:
    raw = tiny()
    read = read_model_config(raw, "config.json")
    spec = model_spec(read)
    layers = [*spec.layers, *(depth.layer for depth in spec.mtp)]
    assert [layer.attention.kind is AttentionKind.FULL for layer in layers] == [i % 4 == 0 and i < 9 for i in range(12)]
    assert [layer.attention.num_heads for layer in layers] == [4, 6, 6, 6, 4, 6, 6, 6, 4, 6, 6, 6]
    assert [layer.attention.rope.rotary_dim for layer in layers] == [8, 16, 16, 16] * 3
    assert [layer.attention.rope.theta for layer in layers] == raw["rope_theta"]
    assert {layer.attention.window for layer in layers} == {None, 6}
    assert [isinstance(layer.ffn, MoeFfnSpec) for layer in layers] == [3 <= i < 9 for i in range(12)]
    moe = [layer.ffn for layer in layers if isinstance(layer.ffn, MoeFfnSpec)]
    assert [ffn.expert_clamp for ffn in moe] == [None] * 4 + [1.0, 1.0]
    assert [ffn.shared.clamp for ffn in moe] == [None] * 5 + [1.5]
    assert {(ffn.num_experts, ffn.top_k, ffn.expert_hidden_size, ffn.shared.hidden_size) for ffn in moe} == {
        (8, 3, 32, 48)
    }
    assert read_precision(raw, "config.json") == "fp32"
    assert same_json(write_model_config(read, "fp32", base=raw), raw)


@pytest.mark.parametrize("name", MODELS)
def test_presets_out_and_in(name: str, tmp_path: Path) -> None:
    config = model(name, tmp_path)
    written = write_model_config(config, "fp32", max_position_embeddings=4096)
    assert set(written) == set(RELEASE) - {"auto_map"}
    assert (written["bos_token_id"], written["eos_token_id"], written["max_seq_len"]) == (None, None, 4096)
    assert read_model_config(json.loads(json.dumps(written)), name) == config
    assert read_precision(written, name) == "fp32"


def test_what_the_model_says_wins_over_the_base() -> None:
    config = read_model_config(tiny(), "config.json")
    config = config.model_copy(
        update={
            "norm_eps": 1e-6,
            "num_layers": 8,
            "clamp": config.clamp.model_copy(update={"routed": {7: 2.0}, "shared": {}}),
            "mtp": config.mtp.model_copy(update={"depths": 0}),
        }
    )
    written = write_model_config(config, "bf16", base={**tiny(), "pad_token_id": 1}, max_position_embeddings=256)
    assert (written["num_hidden_layers"], written["num_nextn_predict_layers"]) == (8, 0)
    assert written["swiglu_limits"] == [0.0] * 7 + [2.0] and written["swiglu_limits_shared"] == [0.0] * 8
    assert written["moe_layers_enum"] == "3,4,5,6,7"
    assert (written["torch_dtype"], written["rms_norm_eps"]) == ("bfloat16", 1e-6)
    assert (written["max_position_embeddings"], written["max_seq_len"]) == (256, 256)
    assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (0, [1, 2, 7], 1)
    assert read_model_config(written, "written") == config


def test_epsilon_is_written_only_where_it_says_something() -> None:
    config = read_model_config(tiny(), "config.json")
    assert config.norm_eps == 1e-5
    assert "rms_norm_eps" not in write_model_config(config, "fp32", base=tiny())
    explicit = {**tiny(), "rms_norm_eps": 1e-05}
    assert same_json(write_model_config(config, "fp32", base=explicit), explicit)
    other = read_model_config({**tiny(), "rms_norm_eps": 1e-6}, "config.json")
    assert other.norm_eps == 1e-6
    assert write_model_config(config, "fp32", base={**tiny(), "rms_norm_eps": 1e-6})["rms_norm_eps"] == 1e-5


def test_shared_heads_are_written_as_own_ones() -> None:
    config = read_model_config(tiny(), "config.json")
    shared = config.model_copy(update={"mtp": config.mtp.model_copy(update={"head": "shared"})})
    assert write_model_config(shared, "fp32", base=tiny()) == tiny()


def test_the_base_must_be_readable() -> None:
    config = read_model_config(tiny(), "config.json")
    with pytest.raises(ConfigError, match=r"came with.*\n.*quantization_config"):
        write_model_config(config, "fp32", base={**tiny(), "quantization_config": {"bits": 4}})


# ------------------------------------------------------------------------- random model configurations

SCALING = st.none() | st.fixed_dictionaries(
    {
        "factor": st.floats(1.0, 64.0),
        "low_freq_factor": st.floats(0.5, 2.0),
        "high_freq_factor": st.floats(2.5, 64.0),
        "original_length": st.integers(1, 1 << 20),
    }
)
# With head_dim of 16: 2, 4, ..., 16 rotated dimensions.
FRACTION = st.integers(1, 8).map(lambda pairs: pairs / 8)


@st.composite
def model_configs(draw: st.DrawFn) -> ModelConfig:
    """Models that the release's layout can express, each written in one way only.

    A pattern is seen whole at least once, +heads stands where the heads differ, and a model without sliding layers has
    the full layers' heads, groups and RoPE in its sliding section.
    """
    sliding_run, full_run = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    pattern = f"S{sliding_run}F{full_run}" if sliding_run else "FFFF"
    num_layers = draw(st.integers(1 + (sliding_run + full_run if sliding_run else 0), 14))
    depths = draw(st.integers(0, 3))
    num_dense = draw(st.integers(0, num_layers))
    scaling = draw(SCALING)
    scaled_full, scaled_sliding = draw(st.booleans()), draw(st.booleans())
    full: Json = {
        "num_kv_groups": draw(st.integers(1, 3)),
        "rope": {
            "theta": draw(st.floats(1.0, 1e8)),
            "rotary_fraction": draw(FRACTION),
            "scaling": scaling if scaled_full else None,
        },
    }
    full["num_heads"] = full["num_kv_groups"] * draw(st.integers(1, 3))
    sliding: Json
    if sliding_run or depths:
        sliding = {
            "num_kv_groups": draw(st.integers(1, 3)),
            "rope": {
                "theta": draw(st.floats(1.0, 1e8)),
                "rotary_fraction": draw(FRACTION),
                "scaling": scaling if scaled_sliding else None,
            },
        }
        sliding["num_heads"] = sliding["num_kv_groups"] * draw(st.integers(1, 3))
    else:
        sliding = {**full, "rope": {**full["rope"], "scaling": None}}
    other_heads = sliding["num_heads"] != full["num_heads"]
    num_experts = draw(st.integers(1, 16))
    limit = st.floats(1e-3, 100.0)
    return ModelConfig.model_validate(
        {
            "vocab_size": draw(st.integers(1, 2**31 - 1)),
            "hidden_size": draw(st.integers(1, 1 << 14)),
            "num_layers": num_layers,
            "num_dense_layers": num_dense,
            "layout": pattern + "+heads" * other_heads + "+gate" * draw(st.booleans()),
            "head_dim": 16,
            "dense_hidden_size": draw(st.integers(1, 1 << 14)),
            "full": full,
            "sliding": {**sliding, "window": draw(st.integers(1, 1 << 12))},
            "moe": {
                "num_experts": num_experts,
                "top_k": draw(st.integers(1, num_experts)),
                "expert_hidden_size": draw(st.integers(1, 512)),
                "shared_hidden_size": draw(st.integers(1, 512)),
                "scaling_factor": draw(st.floats(0.1, 10.0)),
            },
            "clamp": {
                "routed": draw(st.dictionaries(st.integers(num_dense, num_layers - 1), limit))
                if num_dense < num_layers
                else {},
                "shared": draw(st.dictionaries(st.integers(0, num_layers - 1), limit)),
            },
            "mtp": {"depths": depths},
            "norm_eps": draw(st.just(1e-5) | st.floats(1e-12, 1e-3)),
        }
    )


@given(config=model_configs(), precision=st.sampled_from(["bf16", "fp32"]))
@settings(max_examples=150, deadline=None)
def test_random_models_out_and_in(config: ModelConfig, precision: Any) -> None:
    written = json.loads(json.dumps(write_model_config(config, precision, max_position_embeddings=512)))
    assert set(written) - {"rms_norm_eps"} == set(RELEASE) - {"auto_map"}
    assert ("rms_norm_eps" in written) == (config.norm_eps != 1e-5)
    assert read_model_config(written, "written") == config
    assert read_precision(written, "written") == precision
    again = write_model_config(config, precision, base=written)
    assert same_json(again, written)


@given(
    pattern=st.sampled_from(["FFFF", "S3F1", "S1F1", "S5F2", "S2F4"]),
    options=st.sampled_from(["", "+heads", "+gate", "+heads+gate"]),
    num_layers=st.integers(1, 9),
    depths=st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_short_models_read_back_as_the_same_layers(pattern: str, options: str, num_layers: int, depths: int) -> None:
    """A layout that is not seen whole, or unused heads: the layers are the same, whatever the layout is called."""
    config = read_model_config(tiny(), "config.json")
    config = config.model_copy(
        update={
            "layout": pattern + options,
            "num_layers": num_layers,
            "num_dense_layers": 1,
            "clamp": config.clamp.model_copy(update={"routed": {}, "shared": {}}),
            "mtp": config.mtp.model_copy(update={"depths": depths}),
        }
    )
    written = write_model_config(config, "fp32", max_position_embeddings=512)
    assert model_spec(read_model_config(written, "written")) == model_spec(config)


# ------------------------------------------------------------------------------ forms that are understood


def without(*keys: str) -> Callable[[Json], Json]:
    return lambda raw: {key: value for key, value in raw.items() if key not in keys}


def trimmed(*keys: str) -> Callable[[Json], Json]:
    return lambda raw: {key: value[:9] if key in keys else value for key, value in raw.items()}


def changed(**values: object) -> Callable[[Json], Json]:
    return lambda raw: {**raw, **values}


@pytest.mark.parametrize(
    "change",
    [
        trimmed("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"),
        changed(moe_layers_enum=[3, 4, 5, 6, 7, 8]),
        changed(moe_layers_enum="8, 7,6,5,4,3"),
        changed(hidden_size=64.0, swiglu_limits=[None] * 7 + [1, 1] + [0] * 3),
        changed(use_rope_layers=None),
        without("moe_layer_offset", "moe_every_n_layer", "max_seq_len", "max_position_embeddings", "architectures"),
        changed(
            hidden_act="silu", attention_bias=False, mlp_bias=None, attention_dropout=0.0, quantization_config=None
        ),
        changed(use_cache=True, transformers_version="5.24.0", initializer_range=0.02, pad_token_id=1),
        changed(something_new=None, something_off=False, something_empty=[], another={}),
        changed(dtype="float32"),
    ],
)
def test_other_forms_of_the_same_model(change: Callable[[Json], Json]) -> None:
    assert read_model_config(change(tiny()), "config.json") == read_model_config(tiny(), "config.json")


def test_one_number_for_all_layers() -> None:
    raw = {**tiny(), "rope_theta": 10000.0, "partial_rotary_factors": 0.5}
    read = read_model_config(raw, "config.json")
    assert {section.rope.theta for section in (read.full, read.sliding)} == {1e4}
    assert {section.rope.rotary_fraction for section in (read.full, read.sliding)} == {0.5}


@pytest.mark.parametrize(
    ("types", "full", "sliding"),
    [
        (["full_attention"], True, False),
        (["sliding_attention"], False, True),
        (["full_attention", "sliding_attention"], True, True),
    ],
)
def test_scaling_goes_to_the_kinds_that_yarn_only_types_names(types: list[str], full: bool, sliding: bool) -> None:
    raw = {**tiny(), "yarn_only_types": types}
    read = read_model_config(raw, "config.json")
    assert (read.full.rope.scaling is not None, read.sliding.rope.scaling is not None) == (full, sliding)
    assert write_model_config(read, "fp32", base=raw) == raw


@pytest.mark.parametrize("change", [{"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}])
def test_no_scaling(change: Json) -> None:
    read = read_model_config({**tiny(), **change}, "config.json")
    assert read.full.rope.scaling is None and read.sliding.rope.scaling is None
    written = write_model_config(read, "fp32", base=tiny())
    assert written == {**tiny(), "rope_scaling": None}
    alone = write_model_config(read, "fp32", max_position_embeddings=512)
    assert alone["rope_scaling"] is None and alone["yarn_only_types"] == []


def test_sliding_layers_without_a_setting_of_their_own_have_the_full_heads() -> None:
    read = read_model_config({**tiny(), "attention_other_setting": None}, "config.json")
    assert (read.layout, read.sliding.num_heads, read.sliding.num_kv_groups) == ("S3F1+gate", 4, 2)


def test_no_head_gate() -> None:
    read = read_model_config({**tiny(), "use_head_wise_attn_gate": False}, "config.json")
    assert read.layout == "S3F1+heads"


def kinds(text: str) -> list[str]:
    return [{"F": "full_attention", "S": "sliding_attention"}[kind] for kind in text]


def by_kind(text: str, **values: Any) -> Json:
    """The tiny file with other attention kinds, given as letters for all layers and depths."""
    full = [kind == "F" for kind in text]
    return {
        **tiny(),
        "layer_types": kinds(text),
        "rope_theta": [5e6 if kind else 1e4 for kind in full],
        "partial_rotary_factors": [0.5 if kind else 1.0 for kind in full],
        **values,
    }


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("FFFFFFFFF", "FFFF"),
        ("FSFSFSFSF", "S1F1"),
        ("FSSSFSSSF", "S3F1"),
        ("FSSFFSSFF", "S2F2"),
        ("FSSSSSFFS", "S5F2"),
        ("FSSSSSSSS", "S8F1"),
        ("FSFFFFFFF", "S1F7"),
    ],
)
def test_layouts(text: str, layout: str) -> None:
    read = read_model_config(by_kind(text + "SSS"), "config.json")
    assert read.layout == layout + "+heads+gate"
    assert model_spec(read).layers[0].attention.kind is AttentionKind.FULL
    assert [layer.attention.kind is AttentionKind.FULL for layer in model_spec(read).layers] == [k == "F" for k in text]


def test_full_attention_everywhere_without_depths() -> None:
    limits = {key: tiny()[key][:9] for key in ("swiglu_limits", "swiglu_limits_shared")}
    read = read_model_config(by_kind("F" * 9, num_nextn_predict_layers=0, **limits), "config.json")
    assert read.layout == "FFFF+gate" and read.mtp.depths == 0
    assert read.sliding.rope.theta == 5e6 and read.sliding.rope.scaling is None


def test_a_model_without_experts() -> None:
    limits = [0.0] * 12
    raw = {**tiny(), "use_moe": False, "moe_layers_enum": "", "swiglu_limits": limits}
    read = read_model_config(raw, "config.json")
    assert read.num_dense_layers == read.num_layers == 9
    # Limits of dense layers are those of swiglu_limits_shared.
    last = model_spec(read).layers[8].ffn
    assert isinstance(last, DenseFfnSpec) and last.clamp == 1.5
    assert write_model_config(read, "fp32", base=raw) == raw


# --------------------------------------------------------------------------------------- refusals


def item(key: str, index: int, value: object) -> Callable[[Json], Json]:
    """The file with one item of a list changed."""

    def change(raw: Json) -> Json:
        raw = copy.deepcopy(raw)
        raw[key][index] = value
        return raw

    return change


def inner(key: str, name: str, value: object) -> Callable[[Json], Json]:
    """The file with one key of a mapping changed."""
    return lambda raw: {**raw, key: {**raw[key], name: value}}


def inner_without(key: str, name: str) -> Callable[[Json], Json]:
    return lambda raw: {**raw, key: {other: value for other, value in raw[key].items() if other != name}}


REFUSED: list[tuple[Callable[[Json], Json], str, str]] = [
    # What is not supported.
    (changed(norm_expert_weight=False), "norm_expert_weight is false", "true"),
    (changed(moe_router_activation="softmax"), 'moe_router_activation is "softmax"', "sigmoid"),
    (changed(use_rope_layers=[True] * 9), "use_rope_layers is a list of 9", "[]"),
    (changed(zero_centered=False), "zero_centered is false", "true"),
    (changed(tie_word_embeddings=True), "tie_word_embeddings is true", "false"),
    (changed(use_qk_norm=False), "use_qk_norm is false", "true"),
    (changed(need_fp32_gate=False), "need_fp32_gate is false", "true"),
    (changed(use_moe_router_bias=False), "use_moe_router_bias is false", "true"),
    (changed(att_impl_type="MFA"), 'att_impl_type is "MFA"', "GQA"),
    (changed(attention_bias=True), "attention_bias is true", "false"),
    (changed(mlp_bias=True), "mlp_bias is true", "false"),
    (changed(sink=True), "sink is true", "no tensors"),
    (changed(hidden_act="gelu"), 'hidden_act is "gelu"', "silu"),
    (changed(model_type="step3p7"), 'model_type is "step3p7"', "step3p5"),
    (changed(quantization_config={"quant_method": "fp8"}), "quantization_config is", "null"),
    (changed(attention_dropout=0.1), "attention_dropout is 0.1", "must be 0"),
    (changed(torch_dtype="float16"), 'torch_dtype is "float16"', "bfloat16 or float32"),
    (changed(dtype="bfloat16"), "dtype and torch_dtype", '"bfloat16" and "float32"'),
    (changed(moe_layer_offset=1), "moe_layer_offset is 1", "must be 0"),
    (changed(moe_every_n_layer=2), "moe_every_n_layer is 2", "must be 1"),
    (changed(use_mfa=True), "use_mfa is true", "no such key"),
    (changed(logit_softcap=0), "logit_softcap is 0", "no such key"),
    # Wrong types and sizes.
    (changed(hidden_size="64"), 'hidden_size is "64"', "whole number"),
    (changed(hidden_size=True), "hidden_size is true", "whole number"),
    (changed(hidden_size=[64]), "hidden_size is [64]", "whole number"),
    (changed(hidden_size=64.5), "hidden_size is 64.5", "whole number"),
    (changed(hidden_size=0), "hidden_size is 0", "from 1"),
    (changed(vocab_size=2**31), f"vocab_size is {2**31}", "to 2147483647"),
    (changed(vocab_size=10**400), "vocab_size is 1000", "to 2147483647"),
    (changed(intermediate_size=None), "intermediate_size is null", "whole number"),
    (changed(sliding_window=0), "sliding_window is 0", "from 1"),
    (changed(moe_router_scaling_factor=float("nan")), "moe_router_scaling_factor is NaN", "finite"),
    (changed(moe_router_scaling_factor=0), "moe_router_scaling_factor is 0", "greater than 0"),
    (changed(moe_router_scaling_factor=True), "moe_router_scaling_factor is true", "finite"),
    (changed(rms_norm_eps=0.0), "rms_norm_eps is 0.0", "at least 1e-30"),
    (changed(rms_norm_eps="1e-5"), 'rms_norm_eps is "1e-5"', "at least 1e-30"),
    (changed(use_head_wise_attn_gate=1), "use_head_wise_attn_gate is 1", "true or false"),
    (changed(sink=0), "sink is 0", "false"),
    (changed(use_moe="yes"), 'use_moe is "yes"', "true or false"),
    (changed(max_seq_len="long"), 'max_seq_len is "long"', "whole number"),
    (changed(max_position_embeddings=-1), "max_position_embeddings is -1", "from 1"),
    (changed(bos_token_id="<s>"), 'bos_token_id is "<s>"', "token id"),
    (changed(eos_token_id=[1, None]), "eos_token_id is [1, null]", "token id"),
    (changed(num_nextn_predict_layers=-1), "num_nextn_predict_layers is -1", "from 0"),
    # Per-layer arrays.
    (trimmed("layer_types"), "layer_types is a list of 9", "a list of 12"),
    (changed(rope_theta=[1e4] * 11), "rope_theta is a list of 11", "12 or 9"),
    (changed(partial_rotary_factors=[]), "partial_rotary_factors is []", "12 or 9"),
    (changed(swiglu_limits=0.0), "swiglu_limits is 0.0", "12 or 9"),
    (changed(num_nextn_predict_layers=0), "layer_types is a list of 12", "a list of 9"),
    (item("rope_theta", 5, 1e5), "rope_theta[5] is 100000.0", "10000, as layer 1: all sliding"),
    (item("rope_theta", 4, 1e4), "rope_theta[4] is 10000.0", "all full"),
    (item("rope_theta", 10, 1e5), "rope_theta[10] is 100000.0", "all sliding"),
    (item("rope_theta", 2, "1e4"), 'rope_theta[2] is "1e4"', "finite"),
    (item("rope_theta", 2, float("inf")), "rope_theta[2] is Infinity", "finite"),
    (item("rope_theta", 2, True), "rope_theta[2] is true", "finite"),
    (item("partial_rotary_factors", 3, 0.5), "partial_rotary_factors[3] is 0.5", "1, as layer 1"),
    (item("partial_rotary_factors", 3, 1.5), "partial_rotary_factors[3] is 1.5", "at most 1"),
    (changed(partial_rotary_factors=0.3), "partial_rotary_factors is 0.3 for full", "positive even number"),
    (item("swiglu_limits", 7, -1.0), "swiglu_limits[7] is -1.0", "not negative"),
    (item("swiglu_limits", 7, "x"), 'swiglu_limits[7] is "x"', "not negative"),
    (item("swiglu_limits", 1, 7.0), "swiglu_limits[1] is 7.0", "dense"),
    (item("swiglu_limits", 9, 7.0), "swiglu_limits[9] is 7.0", "MTP depths are not clamped"),
    (item("swiglu_limits_shared", 11, 7), "swiglu_limits_shared[11] is 7", "MTP depths are not clamped"),
    (item("layer_types", 3, "linear_attention"), 'layer_types[3] is "linear_attention"', "sliding_attention"),
    (item("layer_types", 3, None), "layer_types[3] is null", "sliding_attention"),
    (lambda raw: by_kind("FSSSFSSSFFSS"), 'layer_types[9] is "full_attention"', "MTP depths have sliding"),
    (lambda raw: by_kind("SSSFSSSFSSSS"), 'layer_types[0] is "sliding_attention"', "layer 0 is always full"),
    (lambda raw: by_kind("FSSSFSSFFSSS"), 'layer_types[7] is "full_attention"', "here S3F1"),
    (lambda raw: by_kind("FFSSFFSSFSSS"), 'layer_types[1] is "full_attention"', "must be sliding_attention"),
    (
        lambda raw: {**by_kind("F" * 9 + "SSS"), "rope_theta": [1e4] * 9},
        "rope_theta is a list of 9",
        "only the MTP depths are sliding",
    ),
    # Heads of sliding layers.
    (inner("attention_other_setting", "head_dim", 32), "attention_other_setting.head_dim is 32", "16"),
    (inner("attention_other_setting", "true_head_dim", 8), "attention_other_setting.true_head_dim is 8", "16"),
    (
        inner("attention_other_setting", "attention_type", "full_attention"),
        'attention_other_setting.attention_type is "full_attention"',
        "sliding_attention",
    ),
    (
        inner("attention_other_setting", "num_attention_heads", "6"),
        'attention_other_setting.num_attention_heads is "6"',
        "whole",
    ),
    (
        inner_without("attention_other_setting", "num_attention_groups"),
        "attention_other_setting.num_attention_groups is missing",
        "whole",
    ),
    (inner("attention_other_setting", "window", 3), "attention_other_setting.window is not known", "true_head_dim"),
    (changed(attention_other_setting=[]), "attention_other_setting is []", "mapping"),
    (
        inner("attention_other_setting", "num_attention_heads", 7),
        "attention_other_setting.num_attention_heads is 7",
        "multiple of attention_other_setting.num_attention_groups (2)",
    ),
    (changed(num_attention_heads=5), "num_attention_heads is 5", "multiple of num_attention_groups (2)"),
    # Scaling.
    (inner("rope_scaling", "rope_type", "yarn"), 'rope_scaling.rope_type is "yarn"', "llama3"),
    (inner("rope_scaling", "factor", 0), "rope_scaling.factor is 0", "greater than 0"),
    (inner("rope_scaling", "beta_fast", 32), "rope_scaling.beta_fast is not known", "low_freq_factor"),
    (inner_without("rope_scaling", "high_freq_factor"), "rope_scaling.high_freq_factor is missing", "finite"),
    (inner("rope_scaling", "low_freq_factor", 32.0), "rope_scaling.low_freq_factor is 32.0", "less than"),
    (
        inner("rope_scaling", "original_max_position_embeddings", 0.5),
        "rope_scaling.original_max_position_embeddings is 0.5",
        "whole",
    ),
    (changed(rope_scaling="llama3"), 'rope_scaling is "llama3"', "mapping"),
    (changed(yarn_only_types=["mlp"]), 'yarn_only_types is ["mlp"]', "full_attention and sliding_attention"),
    (changed(yarn_only_types=[]), "yarn_only_types is []", "disagree"),
    (changed(yarn_only_types="full_attention"), 'yarn_only_types is "full_attention"', "a list"),
    # Experts.
    (changed(moe_layers_enum="3,4,5,7,8"), 'moe_layers_enum is "3,4,5,7,8"', "without gaps"),
    (changed(moe_layers_enum="3,4,5,6,7"), 'moe_layers_enum is "3,4,5,6,7"', "ends with the last decoder layer, 8"),
    (changed(moe_layers_enum="3,3,4,5,6,7,8"), "moe_layers_enum is", "without gaps"),
    (changed(moe_layers_enum="3,4,5,6,7,8,9,10,11"), "moe_layers_enum is", "MTP depths are dense"),
    (changed(moe_layers_enum="three"), 'moe_layers_enum is "three"', "numbers of the MoE layers"),
    (changed(moe_layers_enum="-1,0,1,2,3,4,5,6,7,8"), "moe_layers_enum is", "numbers of the MoE layers"),
    (changed(moe_layers_enum=[-1, *range(9)]), "moe_layers_enum is a list of 10", "numbers of the MoE layers"),
    (changed(moe_layers_enum=[3, 4, 5, 6, 7, True]), "moe_layers_enum is a list of 6", "numbers of the MoE layers"),
    (changed(moe_layers_enum=None), "moe_layers_enum is null", "numbers of the MoE layers"),
    (changed(moe_layers_enum=""), 'moe_layers_enum is ""', "as use_moe is true"),
    (changed(use_moe=False), "moe_layers_enum is", "empty, as use_moe is false"),
    (changed(moe_top_k=9), "moe_top_k is 9", "at most moe_num_experts (8)"),
    (changed(moe_num_experts=1_000_001, moe_top_k=1), "moe_num_experts is 1000001", "to 1000000"),
]


@pytest.mark.parametrize(("change", "found", "right"), REFUSED, ids=[found for _, found, _ in REFUSED])
def test_refusals(change: Callable[[Json], Json], found: str, right: str) -> None:
    problems = problems_of(change(tiny()))
    named = [problem for problem in problems if problem.startswith(found)]
    assert len(named) == 1 and right in named[0], problems


def test_a_refusal_brings_no_others_with_it() -> None:
    """One wrong value is one line, but where the number or the kinds of the layers are what is wrong."""
    several = ("layer_types", "num_nextn_predict_layers", "partial_rotary_factors is 0.3")
    for change, found, _ in REFUSED:
        if not found.startswith(several):
            assert len(problems_of(change(tiny()))) == 1, found


NEEDED = sorted(
    set(RELEASE)
    - {"architectures", "auto_map", "bos_token_id", "eos_token_id", "max_position_embeddings", "max_seq_len"}
    - {"moe_layer_offset", "moe_every_n_layer"}
)


@pytest.mark.parametrize("key", NEEDED)
def test_missing_keys(key: str) -> None:
    problems = problems_of(without(key)(tiny()))
    assert any(problem.startswith(f"{key} is missing: it must be ") for problem in problems)


def test_an_empty_file_names_every_key() -> None:
    assert sorted(problem.split(" ")[0] for problem in problems_of({})) == NEEDED


def test_every_problem_is_listed_at_once() -> None:
    changes = [
        changed(norm_expert_weight=False, moe_router_activation="softmax", use_rope_layers=[1], zero_centered=False),
        changed(tie_word_embeddings=True, hidden_size="wide", unheard_of=3, torch_dtype="float8"),
        item("swiglu_limits", 10, 7.0),
        item("rope_theta", 6, 3.0),
        inner("rope_scaling", "rope_type", "yarn"),
        without("vocab_size"),
    ]
    raw = tiny()
    for change in changes:
        raw = change(raw)
    assert sorted(problem.split(" ")[0] for problem in problems_of(raw)) == [
        "hidden_size",
        "moe_router_activation",
        "norm_expert_weight",
        "rope_scaling.rope_type",
        "rope_theta[6]",
        "swiglu_limits[10]",
        "tie_word_embeddings",
        "torch_dtype",
        "unheard_of",
        "use_rope_layers",
        "vocab_size",
        "zero_centered",
    ]


def test_an_item_is_named_with_the_others_of_its_list() -> None:
    raw = item("swiglu_limits", 4, "x")(item("swiglu_limits", 6, -1)(tiny()))
    (problem,) = problems_of(raw)
    assert problem.startswith('swiglu_limits[4] is "x" (so are 6): it must be')


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=14,
)


@given(key=st.sampled_from([*sorted(RELEASE), "rms_norm_eps", *RENAMED, *RESHAPED]), value=ANY_JSON)
@settings(max_examples=400, deadline=None)
def test_whatever_a_key_holds_is_read_or_refused(key: str, value: object) -> None:
    try:
        read = read_model_config({**tiny(), key: value}, "config.json")
    except ConfigError:
        return
    assert model_spec(read).layers


# ---------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("raw", "precision"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float32"}, "fp32"),
        ({"dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float32", "torch_dtype": "float32"}, "fp32"),
    ],
)
def test_precision(raw: Json, precision: str) -> None:
    assert read_precision(raw, "config.json") == precision


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "torch_dtype is missing: it must be bfloat16 or float32"),
        ({"torch_dtype": "float16"}, 'torch_dtype is "float16": it must be bfloat16 or float32'),
        ({"dtype": "auto"}, 'dtype is "auto": it must be bfloat16 or float32'),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype and torch_dtype say different things"),
        ({"torch_dtype": ["bfloat16"]}, "it must be bfloat16 or float32"),
    ],
)
def test_wrong_precision(raw: Json, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_precision(raw, "config.json")
    assert words in str(caught.value)


# ---------------------------------------------------------------------------- what cannot be written


def section(config: ModelConfig, name: str, **values: object) -> ModelConfig:
    """The model with some values of a section changed."""
    return config.model_copy(update={name: getattr(config, name).model_copy(update=values)})


def with_scaled_sliding(config: ModelConfig) -> ModelConfig:
    assert config.full.rope.scaling is not None
    scaling = config.full.rope.scaling.model_copy(update={"factor": 4.0})
    return section(config, "sliding", rope=config.sliding.rope.model_copy(update={"scaling": scaling}))


UNWRITABLE: list[tuple[Callable[[ModelConfig], ModelConfig], str]] = [
    (
        lambda config: config.model_copy(update={"layout": "S3F1+heads+gate+sink"}),
        "model.layout (S3F1+heads+gate+sink)",
    ),
    (lambda config: section(config, "mtp", chain="post_norm"), "model.mtp.chain is post_norm"),
    (lambda config: section(config, "clamp", position="before_silu"), "model.clamp.position is before_silu"),
    (with_scaled_sliding, "model.full.rope.scaling and model.sliding.rope.scaling differ"),
    (lambda config: section(config, "clamp", routed={1: 7.0}), "model.clamp.routed names layer 1: it must"),
    (
        lambda config: section(config, "clamp", shared={9: 7.0, 12: 1.0}),
        "model.clamp.shared names layer 9, 12: it must",
    ),
    (lambda config: section(config, "moe", top_k=9), "moe_top_k is 9"),
    (lambda config: section(config, "full", num_heads=5), "model.full.num_heads (5) must be a multiple"),
    (lambda config: config.model_copy(update={"layout": "SFSF"}), "layout 'SFSF' is not understood"),
]


@pytest.mark.parametrize(("change", "words"), UNWRITABLE, ids=[words for _, words in UNWRITABLE])
def test_models_that_cannot_be_written(change: Callable[[ModelConfig], ModelConfig], words: str) -> None:
    config = change(read_model_config(tiny(), "config.json"))
    with pytest.raises(ConfigError) as caught:
        write_model_config(config, "fp32", base=tiny())
    assert caught.value.title == "the model as a released config.json"
    (problem,) = caught.value.problems
    assert problem.startswith(words)


def test_everything_that_cannot_be_written_is_listed_at_once() -> None:
    config = read_model_config(tiny(), "config.json")
    for change, _ in UNWRITABLE[:6]:
        config = change(config)
    with pytest.raises(ConfigError) as caught:
        write_model_config(config, "fp32")
    *named, length = caught.value.problems
    for (_, words), problem in zip(UNWRITABLE[:3], named[:3], strict=True):
        assert problem.startswith(words)
    assert len(named) == 6 and length.startswith("max_position_embeddings: neither given nor")


# ------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("name", ["release", "tiny case", *MODELS[:2]])
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    """Step3p7TextConfig, transformers' class for model_type step3p5, has the same values for every layer."""
    from transformers import AutoConfig
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

    if name in MODELS:
        config = model(name, tmp_path)
    else:
        config = read_model_config(RELEASE if name == "release" else tiny(), "config.json")
    written = write_model_config(
        config, "bf16", bos_token_id=0, eos_token_id=[1, 2], max_position_embeddings=config.sliding.window * 8
    )
    (tmp_path / "config.json").write_text(json.dumps(written))
    parsed = AutoConfig.from_pretrained(tmp_path)
    assert type(parsed) is Step3p7TextConfig
    theirs: Any = parsed
    spec = model_spec(config)
    assert (theirs.vocab_size, theirs.hidden_size, theirs.num_hidden_layers) == (
        spec.vocab_size,
        spec.hidden_size,
        len(spec.layers),
    )
    assert (theirs.rms_norm_eps, theirs.intermediate_size) == (config.norm_eps, config.dense_hidden_size)
    assert theirs.mtp_layer_types == ["sliding_attention"] * config.mtp.depths
    assert theirs.mtp_mlp_layer_types == ["dense"] * config.mtp.depths
    for index, layer in enumerate(spec.layers):
        attention, ffn = layer.attention, layer.ffn
        kind = f"{attention.kind.value}_attention"
        rope: Json = theirs.rope_parameters[kind]
        assert theirs.layer_types[index] == kind
        assert theirs.head_dim == attention.head_dim and theirs.num_key_value_heads == attention.num_kv_groups
        assert theirs.per_layer_config[index].num_attention_heads == attention.num_heads
        assert attention.window in (None, theirs.sliding_window)
        assert rope["rope_theta"] == attention.rope.theta
        assert rope["partial_rotary_factor"] * theirs.head_dim == attention.rope.rotary_dim
        scaling = attention.rope.scaling
        assert rope["rope_type"] == ("llama3" if scaling else "default")
        if scaling:
            assert rope["factor"] == scaling.factor
            assert rope["original_max_position_embeddings"] == scaling.original_length
            assert (rope["low_freq_factor"], rope["high_freq_factor"]) == (
                scaling.low_freq_factor,
                scaling.high_freq_factor,
            )
        if isinstance(ffn, MoeFfnSpec):
            assert theirs.mlp_layer_types[index] == "sparse"
            assert (theirs.swiglu_limits[index] or None) == ffn.expert_clamp
            assert (theirs.swiglu_limits_shared[index] or None) == ffn.shared.clamp
            assert (theirs.n_routed_experts, theirs.num_experts_per_tok) == (ffn.num_experts, ffn.top_k)
            assert (theirs.moe_intermediate_size, theirs.share_expert_dim) == (
                ffn.expert_hidden_size,
                ffn.shared.hidden_size,
            )
            assert theirs.moe_router_scaling_factor == ffn.scaling_factor
        else:
            assert theirs.mlp_layer_types[index] == "dense"
            assert (theirs.swiglu_limits_shared[index] or None) == ffn.clamp


def saved_by_transformers(raw: Json, folder: Path) -> Json:
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(raw))
    AutoConfig.from_pretrained(folder).save_pretrained(folder / "saved")
    content: Json = json.loads((folder / "saved" / "config.json").read_text())
    return content


@pytest.mark.parametrize("name", ["release", "tiny"])
def test_what_transformers_saves_is_the_same_model(name: str, tmp_path: Path) -> None:
    raw = RELEASE if name == "release" else tiny()
    saved = saved_by_transformers(raw, tmp_path)
    assert "rope_parameters" in saved and "rope_theta" not in saved and "moe_layers_enum" not in saved
    config = read_model_config(saved, "config.json")
    assert config == read_model_config(raw, "config.json")
    assert read_precision(saved, "config.json") == read_precision(raw, "config.json")
    written = write_model_config(config, "fp32", base=saved)
    assert set(RELEASE) - {"auto_map"} <= set(written)
    assert not {"rope_parameters", "per_layer_config", "dtype", "mlp_layer_types", "n_routed_experts"} & set(written)
    assert read_model_config(written, "config.json") == config


SAVED_REFUSED: list[tuple[Callable[[Json], Json], str]] = [
    (changed(num_nextn_predict_layers=2), "layer_types + mtp_layer_types is a list of 12"),
    (changed(mtp_layer_types=["full_attention"] * 3), "layer_types + mtp_layer_types[9]"),
    (changed(mtp_mlp_layer_types=["sparse"] * 3), "mlp_layer_types + mtp_mlp_layer_types is a list of 9"),
    (changed(mlp_layer_types=["sparse", "dense"] + ["sparse"] * 7), "mlp_layer_types + mtp_mlp_layer_types is a list"),
    (changed(mlp_layer_types=["dense"] * 8), "mlp_layer_types is a list of 8"),
    (changed(mlp_layer_types=["moe"] * 9), 'mlp_layer_types and mtp_mlp_layer_types hold "moe"'),
    (changed(moe_layers_enum="4,5,6,7,8"), "mlp_layer_types + mtp_mlp_layer_types and moe_layers_enum say different"),
    (changed(num_sliding_attention_heads=8), "per_layer_config is a mapping"),
    (inner("per_layer_config", "4", {"num_attention_heads": 6}), "per_layer_config is a mapping"),
    (inner("per_layer_config", "5", {"num_attention_heads": 6, "head_dim": 8}), "per_layer_config is a mapping"),
    (changed(query_pre_attn_scalar=256), "query_pre_attn_scalar is 256"),
    (changed(moe_num_experts=16), "n_routed_experts and moe_num_experts say different"),
    (changed(rope_theta=1e4), "rope_parameters: rope_theta and rope_theta say different"),
    (changed(yarn_only_types=["sliding_attention"]), "rope_parameters and yarn_only_types say different"),
    (
        changed(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "rope_parameters is a mapping with rope_type",
    ),
    (inner_without("rope_parameters", "sliding_attention"), "rope_parameters lacks sliding_attention"),
    (
        inner("rope_parameters", "sliding_attention", {"rope_type": "yarn", "rope_theta": 1e4}),
        "rope_parameters has another scaling",
    ),
]


@pytest.mark.parametrize(("change", "words"), SAVED_REFUSED, ids=[words for _, words in SAVED_REFUSED])
def test_refusals_of_what_transformers_saves(change: Callable[[Json], Json], words: str, tmp_path: Path) -> None:
    problems = problems_of(change(saved_by_transformers(tiny(), tmp_path)))
    assert sum(problem.startswith(words) for problem in problems) == 1, problems


def test_no_torch() -> None:
    code = "import sys, steptron.checkpoint.released.model_config as m; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
