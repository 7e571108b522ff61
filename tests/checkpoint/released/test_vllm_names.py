"""What vLLM takes from a model in the released layout: every tensor, by exactly one of its two loaders.

Facts read in the release vLLM 0.33.0 (wheel on PyPI, vllm-project/vllm at g4ba787ec9): in
``vllm/model_executor/models/step3p5.py`` the modules of ``Step3p5ForCausalLM`` and its ``load_weights``, in
``step3p5_mtp.py`` those of ``Step3p5MTP``. vLLM itself needs a GPU and is not installed here: its parameters and the
rules by which its loaders rename are written down as data.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from steptron.checkpoint.released.model_config import write_model_config
from steptron.checkpoint.released.names import released_tensors
from steptron.config.schema import ModelConfig
from steptron.model.layer_spec import model_spec
from tests.config.test_presets import model

TINY = Path(__file__).parents[2] / "data" / "step3p5" / "tiny"

Shape = tuple[int, ...]
Json = dict[str, Any]

STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", "0"),
    "up_proj": ("gate_up_proj", "1"),
}
"""Linear layers that are loaded into a part of a merged one; of experts, the next table is the one that counts."""
EXPERTS = {
    ".moe.gate_proj.weight": (".moe.experts.routed_experts.w13_weight", "w1"),
    ".moe.up_proj.weight": (".moe.experts.routed_experts.w13_weight", "w3"),
    ".moe.down_proj.weight": (".moe.experts.routed_experts.w2_weight", "w2"),
}
"""Stacked experts: the loader wants axis 0 to count all of ``moe_num_experts`` and takes them one by one."""
SHARED_EXPERT = (".share_expert.", ".moe.share_expert.")
OUTSIDE_OF_DEPTH = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head")
"""Names that keep their place in an MTP depth; everything else of a depth goes below its ``mtp_block``."""
DEPTH_RENAMES = ((".transformer.", "."), ("shared_head.output", "shared_head.head"))
READ_FOR_EVERY_LAYER = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits_shared")
"""Keys of config.json that are indexed by the number of a layer, MTP depths counted on from the last one."""


@dataclass
class Loader:
    """One of the two models: its parameters' parts, and what was loaded into them."""

    parts: dict[tuple[str, str], Shape]
    loaded: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def load(self, released: str, parameter: str, part: str, shape: Shape) -> None:
        """What the loader does with a tensor: a name or a shape that does not fit ends it."""
        assert (parameter, part) in self.parts, f"{released} goes to {parameter} {part}, which does not exist"
        assert self.parts[parameter, part] == shape, f"{released} {shape}: {self.parts[parameter, part]} is wanted"
        self.loaded[parameter, part].append(released)


def is_depth(name: str, config: Json) -> bool:
    """MTP depths are told by their number, from ``num_hidden_layers`` on."""
    first = config["num_hidden_layers"]
    return name.startswith(
        tuple(f"model.layers.{first + depth}." for depth in range(config["num_nextn_predict_layers"]))
    )


def main_place(name: str) -> tuple[str, str]:
    """Parameter and part into which the main model's loader puts a tensor that is no depth's."""
    name = name.replace(*SHARED_EXPERT)
    for ending, (place, part) in EXPERTS.items():
        if ending in name:
            return name.replace(ending, place), part
    return stacked(name)


def depth_place(name: str) -> tuple[str, str]:
    """The same of the MTP model's loader."""
    if not any(word in name for word in OUTSIDE_OF_DEPTH):
        prefix = ".".join(name.split(".")[:3])
        return stacked(name.replace(f"{prefix}.", f"{prefix}.mtp_block."))
    for old, new in DEPTH_RENAMES:
        name = name.replace(old, new)
    return name, ""


def stacked(name: str) -> tuple[str, str]:
    for word, (merged, part) in STACKED.items():
        if word in name:
            return name.replace(word, merged), part
    return name, ""


def layer_parts(config: Json, layer: int) -> dict[tuple[str, str], Shape]:
    """Parameters of a decoder layer, by their name in it, in the parts that are loaded one by one."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    attention = config
    if config["layer_types"][layer] == config["attention_other_setting"]["attention_type"]:
        attention = config["attention_other_setting"]
    heads, groups, head = (attention[key] for key in ("num_attention_heads", "num_attention_groups", "head_dim"))
    parts: dict[tuple[str, str], Shape] = {
        ("input_layernorm.weight", ""): (hidden,),
        ("post_attention_layernorm.weight", ""): (hidden,),
        ("self_attn.qkv_proj.weight", "q"): (heads * head, hidden),
        ("self_attn.qkv_proj.weight", "k"): (groups * head, hidden),
        ("self_attn.qkv_proj.weight", "v"): (groups * head, hidden),
        ("self_attn.o_proj.weight", ""): (hidden, heads * head),
        ("self_attn.g_proj.weight", ""): (heads, hidden),
        ("self_attn.q_norm.weight", ""): (head,),
        ("self_attn.k_norm.weight", ""): (head,),
    }
    if layer not in map(int, config["moe_layers_enum"].split(",")):
        return parts | mlp_parts("mlp", hidden, config["intermediate_size"])
    experts = config["moe_num_experts"]
    return parts | {
        ("moe.gate.weight", ""): (experts, hidden),
        ("moe.router_bias", ""): (experts,),
        ("moe.experts.routed_experts.w13_weight", "w1"): (experts, width, hidden),
        ("moe.experts.routed_experts.w13_weight", "w3"): (experts, width, hidden),
        ("moe.experts.routed_experts.w2_weight", "w2"): (experts, hidden, width),
        **mlp_parts("moe.share_expert", hidden, config["share_expert_dim"]),
    }


def mlp_parts(prefix: str, hidden: int, width: int) -> dict[tuple[str, str], Shape]:
    return {
        (f"{prefix}.gate_up_proj.weight", "0"): (width, hidden),
        (f"{prefix}.gate_up_proj.weight", "1"): (width, hidden),
        (f"{prefix}.down_proj.weight", ""): (hidden, width),
    }


def main_model(config: Json) -> Loader:
    vocabulary = (config["vocab_size"], config["hidden_size"])
    parts: dict[tuple[str, str], Shape] = {
        ("model.embed_tokens.weight", ""): vocabulary,
        ("model.norm.weight", ""): (config["hidden_size"],),
        ("lm_head.weight", ""): vocabulary,
    }
    for layer in range(config["num_hidden_layers"]):
        parts |= {(f"model.layers.{layer}.{n}", p): shape for (n, p), shape in layer_parts(config, layer).items()}
    return Loader(parts)


def mtp_model(config: Json) -> Loader:
    """Each depth has its own output matrix; the embedding is loaded once more."""
    hidden, first = config["hidden_size"], config["num_hidden_layers"]
    vocabulary = (config["vocab_size"], hidden)
    parts: dict[tuple[str, str], Shape] = {("model.embed_tokens.weight", ""): vocabulary}
    for layer in range(first, first + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        parts |= {
            (f"{prefix}.enorm.weight", ""): (hidden,),
            (f"{prefix}.hnorm.weight", ""): (hidden,),
            (f"{prefix}.eh_proj.weight", ""): (hidden, 2 * hidden),
            (f"{prefix}.shared_head.norm.weight", ""): (hidden,),
            (f"{prefix}.shared_head.head.weight", ""): vocabulary,
        }
        parts |= {(f"{prefix}.mtp_block.{n}", p): shape for (n, p), shape in layer_parts(config, layer).items()}
    return Loader(parts)


def load_both(config: Json, tensors: Iterable[tuple[str, Shape]]) -> tuple[Loader, Loader]:
    main, mtp = main_model(config), mtp_model(config)
    for name, shape in tensors:
        if is_depth(name, config):
            mtp.load(name, *depth_place(name), shape)
        else:
            main.load(name, *main_place(name), shape)
        if "embed_tokens" in name:
            mtp.load(name, "model.embed_tokens.weight", "", shape)
    return main, mtp


def assert_all_loaded(config: Json, tensors: dict[str, Shape]) -> None:
    """Every part of every parameter of both models is filled by one tensor, and every tensor is taken by one of them
    (the embedding by both)."""
    loaders = load_both(config, tensors.items())
    for loader in loaders:
        missing = loader.parts.keys() - loader.loaded.keys()
        assert not missing, f"keep their random values: {sorted(missing)}"
        assert all(len(names) == 1 for names in loader.loaded.values())
    main, mtp = (sorted(name for names in loader.loaded.values() for name in names) for loader in loaders)
    assert set(main) & set(mtp) == {"model.embed_tokens.weight"}
    assert sorted({*main, *mtp}) == sorted(tensors)


def exported(config: ModelConfig) -> tuple[Json, dict[str, Shape]]:
    """config.json, names and shapes of a model that is written in the released layout."""
    written = write_model_config(config, "bf16", max_position_embeddings=4096)
    return written, {tensor.name: tensor.shape for tensor in released_tensors(model_spec(config))}


def tiny() -> tuple[Json, dict[str, Shape]]:
    with safe_open(TINY / "model.safetensors", framework="np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return json.loads((TINY / "config.json").read_text()), shapes


@pytest.mark.parametrize("name", ["step3p5-flash", "nano", "tiny"])
def test_an_exported_preset_is_taken_whole(tmp_path: Path, name: str) -> None:
    config, tensors = exported(model(name, tmp_path))
    assert_all_loaded(config, tensors)


def test_the_released_files_of_the_tiny_case_are_taken_whole() -> None:
    assert_all_loaded(*tiny())


@pytest.mark.parametrize("name", ["step3p5-flash", "nano", "tiny"])
def test_what_is_read_for_every_layer_is_there_for_depths_too(tmp_path: Path, name: str) -> None:
    """An array that stopped at the decoder layers would end the MTP model's construction with an IndexError."""
    config, _ = exported(model(name, tmp_path))
    for key in READ_FOR_EVERY_LAYER:
        if isinstance(config[key], list):
            assert len(config[key]) == config["num_hidden_layers"] + config["num_nextn_predict_layers"], key


def test_what_vllm_insists_on(tmp_path: Path) -> None:
    """Values that its constructors assert; the released clamp of routed experts is the only one that it computes."""
    config, _ = exported(model("step3p5-flash", tmp_path))
    assert config["att_impl_type"] == "GQA" and config["num_attention_groups"] > 1
    assert config["use_moe_router_bias"] is True and config["need_fp32_gate"] is True
    assert set(config["swiglu_limits"]) == {0.0, 7.0}
    assert set(config["partial_rotary_factors"]) <= {0.5, 1.0}


@pytest.mark.parametrize(
    ("name", "renamed", "message"),
    [
        ("model.layers.4.share_expert.up_proj.weight", "model.layers.4.moe.shared.up_proj.weight", "does not exist"),
        ("model.layers.4.moe.router_bias", "model.layers.4.moe.gate.bias", "does not exist"),
        ("model.layers.9.transformer.shared_head.output.weight", "model.layers.9.head.weight", "does not exist"),
        ("model.layers.9.enorm.weight", "model.layers.12.enorm.weight", "does not exist"),
        ("model.layers.1.self_attn.v_proj.weight", None, "keep their random values"),
        ("model.layers.11.transformer.shared_head.norm.weight", None, "keep their random values"),
    ],
)
def test_a_wrong_name_would_show(name: str, renamed: str | None, message: str) -> None:
    config, tensors = tiny()
    shape = tensors.pop(name)
    if renamed is not None:
        tensors[renamed] = shape
    with pytest.raises(AssertionError, match=message):
        assert_all_loaded(config, tensors)


@pytest.mark.parametrize(
    "name",
    ["model.layers.4.moe.down_proj.weight", "model.layers.1.self_attn.g_proj.weight", "model.layers.9.eh_proj.weight"],
)
def test_a_wrong_shape_would_show(name: str) -> None:
    config, tensors = tiny()
    tensors[name] = tensors[name][::-1]
    with pytest.raises(AssertionError, match="is wanted"):
        assert_all_loaded(config, tensors)
