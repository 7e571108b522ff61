"""The tiny case through transformers' own model: every tensor in its place, and the case's logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from steptron.checkpoint.released.transformers_names import (
    HEAD,
    mtp_layers,
    released_names,
    to_transformers,
    transformers_name,
)
from tests.checkpoint.released.transfers import do_export, do_import
from tests.worker_pool import WorkerPool

TINY = Path(__file__).parents[2] / "data" / "step3p5" / "tiny"
NUM_LAYERS, DEPTHS = 9, 3
NOT_TRANSFORMERS_KEYS = ("architectures", "model_type", "torch_dtype", "auto_map")
TOLERANCE = 1e-4  # of float32 logits with a standard deviation of 2


@pytest.fixture(scope="module")
def weights(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The case, imported and exported again."""
    folder = tmp_path_factory.mktemp("exported")
    pool.run(1, do_import, TINY, folder / "checkpoint")
    pool.run(1, do_export, folder / "checkpoint", folder / "released")
    return load_file(folder / "released" / "model.safetensors")


@pytest.fixture
def trunk() -> Step3p7TextModel:
    keys = json.loads((TINY / "config.json").read_text())
    config = Step3p7TextConfig(**{key: value for key, value in keys.items() if key not in NOT_TRANSFORMERS_KEYS})
    config._attn_implementation = "eager"
    return Step3p7TextModel(config).eval()


def stored(trunk: Step3p7TextModel) -> dict[str, torch.Tensor]:
    """What the model has and its construction does not compute: parameters and selection biases."""
    biases = {name: buffer for name, buffer in trunk.named_buffers() if name.endswith("e_score_correction_bias")}
    return {**dict(trunk.named_parameters()), **biases}


def logits(trunk: Step3p7TextModel, head: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), np.load(TINY / "expected.npz") as expected:
        hidden = trunk(input_ids=torch.from_numpy(expected["input_ids"]).long()).last_hidden_state
        return torch.nn.functional.linear(hidden, head)


def expected_logits() -> torch.Tensor:
    with np.load(TINY / "expected.npz") as expected:
        return torch.from_numpy(expected["logits"])


def test_every_tensor_is_set_once_and_gives_the_case_s_logits(
    weights: dict[str, torch.Tensor], trunk: Step3p7TextModel
) -> None:
    tensors = to_transformers(weights)
    head = tensors.pop(HEAD)
    targets = stored(trunk)
    assert tensors.keys() == targets.keys()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in targets.items()}
    with torch.no_grad():
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
    assert (logits(trunk, head) - expected_logits()).abs().max() < TOLERANCE


@pytest.mark.parametrize("mistake", ["gate and up swapped", "router bias left out", "shared expert of another layer"])
def test_a_wrong_place_would_show(weights: dict[str, torch.Tensor], trunk: Step3p7TextModel, mistake: str) -> None:
    wrong = dict(weights)
    if mistake == "gate and up swapped":
        one, other = "model.layers.5.moe.gate_proj.weight", "model.layers.5.moe.up_proj.weight"
        wrong[one], wrong[other] = weights[other], weights[one]
    elif mistake == "router bias left out":
        wrong["model.layers.5.moe.router_bias"] = torch.zeros(8)
    else:
        one, other = (f"model.layers.{layer}.share_expert.up_proj.weight" for layer in (5, 6))
        wrong[one], wrong[other] = weights[other], weights[one]
    tensors = to_transformers(wrong)
    head = tensors.pop(HEAD)
    trunk.load_state_dict(tensors, strict=False)
    assert (logits(trunk, head) - expected_logits()).abs().max() > 100 * TOLERANCE


def test_the_names_are_one_to_one(weights: dict[str, torch.Tensor], trunk: Step3p7TextModel) -> None:
    """Back from each of transformers' names to exactly the released names that led there."""
    forward = {name: transformers_name(name, NUM_LAYERS) for name in weights}
    held = {name: place for name, place in forward.items() if place is not None}
    assert {name for name, _ in held.values()} == stored(trunk).keys()
    back = [released for name in stored(trunk) for released in released_names(name)]
    assert sorted(back) == sorted(held)
    for name in stored(trunk):
        parts = [held[released][1] for released in released_names(name)]
        assert parts == (["first_half", "second_half"] if name.endswith("gate_up_proj") else ["whole"]), name
        assert {held[released][0] for released in released_names(name)} == {name}


def test_whole_tensors_are_not_copied(weights: dict[str, torch.Tensor]) -> None:
    tensors = to_transformers(weights)
    assert tensors["embed_tokens.weight"] is weights["model.embed_tokens.weight"]
    fused = tensors["layers.3.mlp.experts.gate_up_proj"]
    assert torch.equal(fused[:, :32], weights["model.layers.3.moe.gate_proj.weight"])
    assert torch.equal(fused[:, 32:], weights["model.layers.3.moe.up_proj.weight"])


def test_mtp_depths_are_told_by_their_own_norm(weights: dict[str, torch.Tensor]) -> None:
    assert mtp_layers(weights) == set(range(NUM_LAYERS, NUM_LAYERS + DEPTHS))
    without = {name: tensor for name, tensor in weights.items() if transformers_name(name, NUM_LAYERS) or name == HEAD}
    assert mtp_layers(without) == set()
    assert to_transformers(without).keys() == to_transformers(weights).keys()


def test_what_has_no_place_is_named(weights: dict[str, torch.Tensor]) -> None:
    wrong = {**weights, "model.layers.4.self_attn.q_proj.bias": torch.zeros(1)}
    del wrong["model.layers.7.moe.up_proj.weight"]
    with pytest.raises(ValueError) as caught:
        to_transformers(wrong)
    assert str(caught.value) == (
        "model.layers.4.self_attn.q_proj.bias has no place in transformers' model; layers.7.mlp.experts.gate_up_proj "
        "needs both model.layers.7.moe.gate_proj.weight and model.layers.7.moe.up_proj.weight"
    )


@pytest.mark.parametrize("name", ["layers.x.norm.weight", "layers.3.moe.gate.weight", "model.norm.weight", ""])
def test_names_of_nothing(name: str) -> None:
    assert released_names(name) == ()
    assert transformers_name(name.removeprefix("model."), NUM_LAYERS) is None
