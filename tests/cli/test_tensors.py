"""`steptron model tensors`."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from typer.testing import CliRunner, Result

from steptron.cli.main import app

ROOT = Path(__file__).parents[2]
FLASH = ROOT / "configs" / "model" / "step3p5-flash.yaml"
TINY = ROOT / "tests" / "data" / "step3p5" / "tiny" / "model.safetensors"
TINY_SIZES = [
    "model.vocab_size=128", "model.hidden_size=64", "model.num_layers=9", "model.head_dim=16",
    "model.dense_hidden_size=96", "model.full.num_heads=4", "model.full.num_kv_groups=2", "model.sliding.num_heads=6",
    "model.sliding.num_kv_groups=2", "model.moe.num_experts=8", "model.moe.top_k=3", "model.moe.expert_hidden_size=32",
    "model.moe.shared_hidden_size=48", "model.clamp={}",
]  # fmt: skip


def tensors(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["model", "tensors", *map(str, arguments)])


def test_the_released_model() -> None:
    result = tensors(FLASH)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[-1] == "804 tensors, 199,384,301,376 parameters, 398,768,626,944 bytes"
    rows = [line.replace(", ", ",").split() for line in lines[:804]]
    assert rows[0] == ["model.embed_tokens.weight", "[128896,4096]", "bf16", "1,055,916,032"]
    assert ["model.layers.44.moe.router_bias", "[288]", "fp32", "1,152"] in rows
    assert ["model.layers.47.transformer.shared_head.output.weight", "[128896,4096]", "bf16", "1,055,916,032"] in rows
    assert lines[804] == ""


def test_json_is_what_a_file_of_that_model_holds() -> None:
    """The tiny case's own safetensors header, by its names, shapes and dtypes."""
    result = tensors(FLASH, *TINY_SIZES, "--layout", "released", "--dtype", "fp32", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    with safe_open(TINY, framework="np") as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        expected = {name: (header.get_shape(), header.get_dtype()) for name, header in headers.items()}
    found = {entry["name"]: (entry["shape"], entry["dtype"].replace("fp", "F")) for entry in content["tensors"]}
    assert found == expected and len(content["tensors"]) == content["count"] == len(expected)
    assert content["bytes"] == sum(entry["bytes"] for entry in content["tensors"]) == 4 * content["parameters"]
    assert content["layout"] == "released"


def test_what_the_layout_cannot_hold_is_refused() -> None:
    result = tensors(FLASH, "model.layout=S3F1+heads+gate+sink")
    assert result.exit_code == 2 and "layers.0.attention.sink has no place in the released layout" in result.output
    assert tensors(FLASH, "--layout", "other").exit_code == 2
    assert tensors("missing.yaml").exit_code == 2
