"""Loads the released layout: config.json to ModelConfig, tensor names to logical matrices.

For tests alone; reads only what the tiny case of ``tests/data/step3p5`` needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from steptron.config.schema import ModelConfig
from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel
from steptron.model.sequence import shift_left

CASE = Path(__file__).resolve().parents[1] / "data" / "step3p5" / "tiny"

_LAYER_NAMES = [
    (r"attention_norm\.weight", "input_layernorm.weight"),
    (r"ffn_norm\.weight", "post_attention_layernorm.weight"),
    (r"attention\.query\.weight", "self_attn.q_proj.weight"),
    (r"attention\.key\.weight", "self_attn.k_proj.weight"),
    (r"attention\.value\.weight", "self_attn.v_proj.weight"),
    (r"attention\.gate\.weight", "self_attn.g_proj.weight"),
    (r"attention\.query_norm\.weight", "self_attn.q_norm.weight"),
    (r"attention\.key_norm\.weight", "self_attn.k_norm.weight"),
    (r"attention\.output_projection\.weight", "self_attn.o_proj.weight"),
    (r"ffn\.router\.weight", "moe.gate.weight"),
    (r"ffn\.router\.bias", "moe.router_bias"),
    (r"ffn\.experts\.(gate|up|down)\.weight", r"moe.\1_proj.weight"),
    (r"ffn\.shared\.(gate|up|down)\.weight", r"share_expert.\1_proj.weight"),
    (r"ffn\.(gate|up|down)\.weight", r"mlp.\1_proj.weight"),
]
_MTP_NAMES = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "final_norm.weight": "transformer.shared_head.norm.weight",
    "head.weight": "transformer.shared_head.output.weight",
}
_OTHER_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def released_name(matrix: str, num_layers: int) -> str:
    """The released checkpoint's name of a logical matrix."""
    if matrix in _OTHER_NAMES:
        return _OTHER_NAMES[matrix]
    mtp = re.fullmatch(r"mtp\.(\d+)\.(.+)", matrix)
    if mtp and not mtp[2].startswith("layer."):
        return f"model.layers.{num_layers + int(mtp[1])}.{_MTP_NAMES[mtp[2]]}"
    layer = re.fullmatch(r"(?:layers\.(\d+)|mtp\.(\d+)\.layer)\.(.+)", matrix)
    assert layer is not None, f"no released name for {matrix}"
    index = int(layer[1]) if layer[1] else num_layers + int(layer[2])
    for pattern, replacement in _LAYER_NAMES:
        match = re.fullmatch(pattern, layer[3])
        if match:
            return f"model.layers.{index}.{match.expand(replacement)}"
    raise AssertionError(f"no released name for {matrix}")


def released_config(**changes: Any) -> ModelConfig:
    """The case's config.json as a model configuration; changes replace whole fields."""
    raw = json.loads((CASE / "config.json").read_text())
    layers, other = raw["num_hidden_layers"], raw["attention_other_setting"]
    full = [kind == "full_attention" for kind in raw["layer_types"]]
    assert full == [index % 4 == 0 for index in range(len(full))], "S3F1"
    moe_layers = [int(index) for index in raw["moe_layers_enum"].split(",")]
    assert moe_layers == list(range(moe_layers[0], layers))
    first_full, first_sliding = full.index(True), full.index(False)
    scaling = raw["rope_scaling"]

    def limits(key: str) -> dict[int, float]:
        return {index: limit for index, limit in enumerate(raw[key]) if limit}

    fields: dict[str, Any] = dict(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=layers,
        num_dense_layers=moe_layers[0],
        layout="S3F1+heads+gate",
        head_dim=raw["head_dim"],
        dense_hidden_size=raw["intermediate_size"],
        full=dict(
            num_heads=raw["num_attention_heads"],
            num_kv_groups=raw["num_attention_groups"],
            rope=dict(
                theta=raw["rope_theta"][first_full],
                rotary_fraction=raw["partial_rotary_factors"][first_full],
                scaling=dict(
                    factor=scaling["factor"],
                    low_freq_factor=scaling["low_freq_factor"],
                    high_freq_factor=scaling["high_freq_factor"],
                    original_length=scaling["original_max_position_embeddings"],
                ),
            ),
        ),
        sliding=dict(
            num_heads=other["num_attention_heads"],
            num_kv_groups=other["num_attention_groups"],
            window=raw["sliding_window"],
            rope=dict(
                theta=raw["rope_theta"][first_sliding], rotary_fraction=raw["partial_rotary_factors"][first_sliding]
            ),
        ),
        moe=dict(
            num_experts=raw["moe_num_experts"],
            top_k=raw["moe_top_k"],
            expert_hidden_size=raw["moe_intermediate_size"],
            shared_hidden_size=raw["share_expert_dim"],
            scaling_factor=raw["moe_router_scaling_factor"],
        ),
        clamp=dict(routed=limits("swiglu_limits"), shared=limits("swiglu_limits_shared")),
        mtp=dict(depths=raw["num_nextn_predict_layers"]),
    )
    return ModelConfig.model_validate(fields | changes)


def released_weights() -> dict[str, torch.Tensor]:
    return load_file(CASE / "model.safetensors")


def expected() -> dict[str, torch.Tensor]:
    with np.load(CASE / "expected.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def expected_gradients() -> dict[str, torch.Tensor]:
    with np.load(CASE / "grads.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


@torch.no_grad()
def load_released(model: StepModel, weights: Mapping[str, torch.Tensor]) -> set[str]:
    """Copies released tensors into a whole model; returns the released names that were read."""
    tensors, read = dict(model.logical_tensors()), set()
    for parameter in model.spec.parameters():
        for matrix in parameter.matrices:
            name = released_name(matrix.name, len(model.spec.layers))
            _rows(tensors[parameter.name], parameter.is_expert, matrix.rows).copy_(weights[name])
            read.add(name)
    return read


def split_released(model: StepModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by logical name (such as gradients) under released names."""
    return {
        released_name(matrix.name, len(model.spec.layers)): _rows(
            tensors[parameter.name], parameter.is_expert, matrix.rows
        )
        for parameter in model.spec.parameters()
        for matrix in parameter.matrices
        if parameter.name in tensors
    }


def case_batch(input_ids_BS: torch.Tensor) -> MicroBatch:
    """Every token but the last of a row has a target; one document per row."""
    mask_BS = torch.ones_like(input_ids_BS, dtype=torch.bool)
    mask_BS[:, -1] = False
    positions_BS = torch.arange(input_ids_BS.shape[1]).expand_as(input_ids_BS)
    return MicroBatch(
        input_ids_BS, shift_left(input_ids_BS, 1, 0), mask_BS, positions_BS, torch.zeros_like(input_ids_BS)
    )


def _rows(tensor: torch.Tensor, stacked: bool, rows: tuple[int, int]) -> torch.Tensor:
    return tensor[:, slice(*rows)] if stacked else tensor[slice(*rows)]
