"""Comparisons with planted differences, between every kind of weights."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
import yaml
from safetensors.torch import load_file, save_file
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel
from typer.testing import CliRunner, Result

from steptron.checkpoint import compare as module
from steptron.checkpoint import compare_sources
from steptron.checkpoint.compare import Comparison, TensorDifference, compare_weights
from steptron.checkpoint.compare_sources import open_source
from steptron.checkpoint.manifest import MODEL, Manifest
from steptron.checkpoint.matrices import StoredMatrices
from steptron.checkpoint.released.folder import CONFIG, INDEX, SINGLE
from steptron.checkpoint.released.model_config import read_model_config
from steptron.checkpoint.released.names import released_tensors
from steptron.checkpoint.released.transformers_names import HEAD, released_names, to_transformers
from steptron.checkpoint.saving import complete, stamp
from steptron.cli.compare import compare
from steptron.cli.lazy import LazyGroup
from steptron.config.schema import ModelConfig
from steptron.errors import ConfigError, UserError
from steptron.model.layer_spec import model_spec

TINY = Path(__file__).parents[1] / "data" / "step3p5" / "tiny"
Q, GATE, BIAS = (
    "model.layers.2.self_attn.q_proj.weight",
    "model.layers.4.moe.gate_proj.weight",
    "model.layers.5.moe.router_bias",
)
NUM_TENSORS = 192
NUM_MTP = 3 * (2 + 7 + 3 + 5)

Weights = dict[str, torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_file(TINY / SINGLE)


def model() -> ModelConfig:
    return read_model_config(json.loads((TINY / CONFIG).read_text()), CONFIG)


def released(folder: Path, weights: Weights, config: dict[str, Any] | None = None, shards: int = 1) -> Path:
    """A folder in the released layout; with several shards and an index the tensors lie in turn in each of them."""
    folder.mkdir(parents=True)
    if config is None:
        shutil.copy(TINY / CONFIG, folder)
    elif config:
        (folder / CONFIG).write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if shards == 1:
        save_file(weights, folder / SINGLE)
        return folder
    names = [f"model-{shard:05d}.safetensors" for shard in range(shards)]
    files = {tensor: names[index % shards] for index, tensor in enumerate(weights)}
    for name in names:
        save_file({tensor: weights[tensor] for tensor, file in files.items() if file == name}, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def checkpoint(folder: Path, weights: Weights, config: ModelConfig, sinks: Weights | None = None) -> Path:
    """A checkpoint that holds a model alone, written with torch's distributed checkpoint."""
    plain = config.model_copy(update={"layout": config.layout.removesuffix("+sink")})
    named = {tensor.matrix.name: weights[tensor.name] for tensor in released_tensors(model_spec(plain))}
    tensors = {f"model.{name}": tensor for name, tensor in (named | (sinks or {})).items()}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / MODEL).write_text(yaml.safe_dump({"model": config.model_dump()}))
    complete(folder, Manifest(**stamp(), processes=1, progress=None, files={}), {})
    return folder


def saved_by_transformers(folder: Path, weights: Weights) -> Path:
    keys = json.loads((TINY / CONFIG).read_text())
    outside = ("architectures", "model_type", "torch_dtype", "auto_map")
    trunk = Step3p7TextModel(Step3p7TextConfig(**{key: keys[key] for key in keys if key not in outside}))
    tensors = to_transformers(weights)
    del tensors[HEAD]
    trunk.load_state_dict(tensors)
    trunk.save_pretrained(folder)
    return folder


def compared(a: Path, b: Path) -> Comparison:
    return compare_weights(open_source(a), open_source(b))


def planted(folder: Path, weights: Weights, name: str, change: Callable[[torch.Tensor], object]) -> TensorDifference:
    """The one difference between the case and a copy in which ``change`` was made to one tensor."""
    changed = {**weights, name: weights[name].clone()}
    change(changed[name])
    comparison = compared(TINY, released(folder, changed))
    assert not comparison.is_same() and comparison.compared == NUM_TENSORS
    assert (comparison.fields, comparison.only_a, comparison.only_b) == ([], [], [])
    (difference,) = comparison.differences
    assert difference.name == name
    return difference


# ------------------------------------------------------------------------------------- the same


def test_a_folder_and_itself() -> None:
    assert compared(TINY, TINY) == Comparison([], [], [], [], NUM_TENSORS, [])


def test_the_same_weights_in_every_kind_of_folder(tmp_path: Path, weights: Weights) -> None:
    kinds = {
        "shards": released(tmp_path / "shards", weights, shards=3),
        "checkpoint": checkpoint(tmp_path / "run" / "checkpoints" / "step_00000001", weights, model()),
        "run": tmp_path / "run",
    }
    for one in kinds.values():
        for other in (*kinds.values(), TINY):
            assert compared(one, other) == Comparison([], [], [], [], NUM_TENSORS, []), (one, other)


def test_a_model_that_transformers_saved(tmp_path: Path, weights: Weights) -> None:
    """It has neither the output matrix nor MTP: those are named as not compared, and nothing else is left out."""
    trunk = saved_by_transformers(tmp_path / "trunk", weights)
    outside = sorted([HEAD, *(name for name in weights if name.startswith(("model.layers.9.", "model.layers.1")))])
    outside = [name for name in outside if not name.startswith("model.layers.1.")]
    assert len(outside) == 1 + NUM_MTP
    saved = checkpoint(tmp_path / "saved", weights, model())
    for one, other in [(TINY, trunk), (trunk, TINY), (saved, trunk), (trunk, saved)]:
        assert compared(one, other) == Comparison([], [], [], outside, NUM_TENSORS - len(outside), [])
    assert compared(trunk, trunk) == Comparison([], [], [], [], NUM_TENSORS - len(outside), [])
    (trunk / CONFIG).unlink()
    assert compared(TINY, trunk) == Comparison(None, [], [], outside, NUM_TENSORS - len(outside), [])


def test_pieces_add_up_to_the_whole(tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows give the counts and norms that whole tensors give, for halves of fused experts too."""
    generator = torch.Generator().manual_seed(0)
    noisy = {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    sides = [
        checkpoint(tmp_path / "saved", noisy, model()),
        released(tmp_path / "noisy", noisy),
        saved_by_transformers(tmp_path / "trunk", noisy),
    ]
    for other in sides:
        whole = {difference.name: difference for difference in compared(TINY, other).differences}
        with monkeypatch.context() as patch:
            patch.setattr(module, "PIECE_ELEMENTS", 1000)
            pieces = {difference.name: difference for difference in compared(TINY, other).differences}
        assert len(whole) >= NUM_TENSORS - NUM_MTP - 1 and pieces.keys() == whole.keys()
        for name, difference in whole.items():
            values, of_pieces = difference.values, pieces[name].values
            assert values is not None and of_pieces is not None
            distance = (noisy[name].double() - weights[name].double()).flatten()
            assert values.max_abs == of_pieces.max_abs == distance.abs().max().item()
            expected = (distance.norm() / weights[name].double().norm()).item()
            assert values.relative == pytest.approx(expected, rel=1e-12)
            assert of_pieces.relative == pytest.approx(expected, rel=1e-12)
            assert values.differing == of_pieces.differing == int((distance != 0).sum())
            assert values.elements == of_pieces.elements == distance.numel()


# ---------------------------------------------------------------------------------- planted values


def test_one_changed_element(tmp_path: Path, weights: Weights) -> None:
    def change(tensor: torch.Tensor) -> None:
        tensor[3, 5] += 0.5

    difference = planted(tmp_path / "b", weights, Q, change)
    values = difference.values
    assert values is not None
    moved = float(weights[Q][3, 5] + 0.5) - float(weights[Q][3, 5])
    assert (values.differing, values.elements, values.max_abs) == (1, weights[Q].numel(), moved)
    assert values.relative == pytest.approx(moved / weights[Q].double().norm().item(), rel=1e-12)
    assert (values.zero_signs, values.nans_a, values.nans_b) == (0, 0, 0)
    assert difference.is_within(values.relative) and not difference.is_within(values.relative * 0.999)


def test_a_last_bit_is_a_difference(tmp_path: Path, weights: Weights) -> None:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(torch.int32)[0, 0] ^= 1

    values = planted(tmp_path / "b", weights, Q, change).values
    assert values is not None and values.differing == 1 and 0 < values.relative < 1e-7


def test_the_sign_of_zero(tmp_path: Path, weights: Weights) -> None:
    zero = {**weights, Q: weights[Q].clone()}
    zero[Q][1, :4] = 0.0
    negative = {**zero, Q: zero[Q].clone()}
    negative[Q][1, :3] = -0.0
    comparison = compared(released(tmp_path / "a", zero), released(tmp_path / "b", negative))
    (difference,) = comparison.differences
    assert difference.values is not None and difference.values.zero_signs == 3
    assert (difference.values.differing, difference.values.max_abs, difference.values.relative) == (0, 0.0, 0.0)
    assert not comparison.is_same() and comparison.is_same(tolerance=1e-30)


def test_equal_nans_are_equal(tmp_path: Path, weights: Weights) -> None:
    broken = {**weights, Q: weights[Q].clone()}
    broken[Q][2, :2] = math.nan
    a, b = released(tmp_path / "a", broken), released(tmp_path / "b", broken)
    assert compared(a, b).is_same()
    broken[Q][0, 0] += 1.0
    (difference,) = compared(a, released(tmp_path / "c", broken)).differences
    values = difference.values
    assert values is not None and (values.nans_a, values.nans_b, values.nan_mismatches, values.differing) == (
        2,
        2,
        0,
        1,
    )
    rest = weights[Q].double().clone()
    rest[2, :2] = 0.0
    assert values.relative == pytest.approx(values.max_abs / rest.norm().item(), rel=1e-12)


def test_a_nan_against_a_number_and_against_another_nan(tmp_path: Path, weights: Weights) -> None:
    def with_nan(bits: int) -> Weights:
        broken = {**weights, Q: weights[Q].clone()}
        broken[Q].view(torch.int32)[2, 7] = bits
        return broken

    quiet, other = (struct.unpack("<i", struct.pack("<I", bits))[0] for bits in (0x7FC00000, 0x7FC00001))
    a = released(tmp_path / "quiet", with_nan(quiet))
    for folder, expected in ((TINY, (1, 0)), (released(tmp_path / "other", with_nan(other)), (1, 1))):
        (difference,) = compared(a, folder).differences
        values = difference.values
        assert values is not None and (values.nans_a, values.nans_b) == expected
        assert (values.differing, values.nan_mismatches, values.max_abs, values.relative) == (1, 1, 0.0, 0.0)
        assert not difference.is_within(math.inf)


def test_infinities(tmp_path: Path, weights: Weights) -> None:
    a = {**weights, Q: weights[Q].clone()}
    a[Q][0, 0] = math.inf
    b = {**a, Q: a[Q].clone()}
    b[Q][0, 1] = -math.inf
    folder = released(tmp_path / "a", a)
    assert compared(folder, folder).is_same()
    (difference,) = compared(folder, released(tmp_path / "b", b)).differences
    assert difference.values is not None
    assert (difference.values.differing, difference.values.max_abs, difference.values.relative) == (
        1,
        math.inf,
        math.inf,
    )


def test_against_zero_the_relative_difference_is_infinite(tmp_path: Path, weights: Weights) -> None:
    zero = {**weights, Q: torch.zeros_like(weights[Q])}
    a = released(tmp_path / "a", zero)
    (difference,) = compared(a, TINY).differences
    assert difference.values is not None and difference.values.relative == math.inf
    (difference,) = compared(TINY, a).differences
    assert difference.values is not None and difference.values.relative == 1.0


# --------------------------------------------------------------------------- dtypes, shapes, names


def test_dtypes_are_compared_by_value(tmp_path: Path, weights: Weights) -> None:
    """bf16 against the fp32 numbers that it was rounded from, and against those that it holds exactly."""
    rounded = {name: tensor if name == BIAS else tensor.bfloat16() for name, tensor in weights.items()}
    exact = {name: tensor.float() for name, tensor in rounded.items()}
    config = {**json.loads((TINY / CONFIG).read_text()), "torch_dtype": "bfloat16"}
    low = released(tmp_path / "low", rounded, config)
    comparison = compared(low, released(tmp_path / "exact", exact))
    assert {difference.name for difference in comparison.differences} == weights.keys() - {BIAS}
    assert all(
        difference.values is not None and difference.values.is_bit_equal for difference in comparison.differences
    )
    assert {(difference.a.dtype, difference.b.dtype) for difference in comparison.differences} == {("bf16", "fp32")}
    assert not comparison.is_same() and comparison.is_same(tolerance=1e-30)
    comparison = compared(low, TINY)
    relative = [difference.values.relative for difference in comparison.differences if difference.values is not None]
    assert len(relative) == NUM_TENSORS - 1 and min(relative) > 1e-4 and max(relative) < 2**-8
    assert comparison.is_same(tolerance=2**-8) and not comparison.is_same(tolerance=1e-4)


def test_another_shape(tmp_path: Path, weights: Weights) -> None:
    changed = {**weights, Q: weights[Q][:-1]}
    comparison = compared(TINY, released(tmp_path / "b", changed))
    (difference,) = comparison.differences
    assert difference.values is None and not difference.is_within(math.inf)
    assert (difference.a.shape, difference.b.shape) == (tuple(weights[Q].shape), tuple(changed[Q].shape))


def test_tensors_on_one_side_only(tmp_path: Path, weights: Weights) -> None:
    renamed = {("model.layers.2.extra.weight" if name == Q else name): tensor for name, tensor in weights.items()}
    other = released(tmp_path / "b", renamed)
    comparison = compared(TINY, other)
    assert (comparison.only_a, comparison.only_b) == ([Q], ["model.layers.2.extra.weight"])
    assert comparison.compared == NUM_TENSORS - 1 and not comparison.is_same(math.inf)
    backward = compared(other, TINY)
    assert (backward.only_a, backward.only_b) == (comparison.only_b, comparison.only_a)


def test_what_transformers_model_should_hold_is_missed(tmp_path: Path, weights: Weights) -> None:
    trunk = saved_by_transformers(tmp_path / "trunk", weights)
    tensors = load_file(trunk / SINGLE)
    fused = "layers.4.mlp.experts.gate_up_proj"
    save_file({name: tensor for name, tensor in tensors.items() if name != fused}, trunk / SINGLE)
    comparison = compared(TINY, trunk)
    assert comparison.only_a == list(released_names(fused)) and not comparison.is_same()
    save_file({**tensors, fused: tensors[fused][:, :-1].contiguous()}, trunk / SINGLE)
    with pytest.raises(
        ConfigError, match=r"gate_up_proj has shape \[8, 63, 64\]: axis 1 must hold model\.layers\.4\.moe"
    ):
        open_source(trunk)


def test_the_right_half_of_fused_experts_is_named(tmp_path: Path, weights: Weights) -> None:
    changed = {**weights, GATE: weights[GATE].clone()}
    changed[GATE][7, 31, 63] += 1.0
    (difference,) = compared(TINY, saved_by_transformers(tmp_path / "trunk", changed)).differences
    assert difference.name == GATE and difference.values is not None and difference.values.differing == 1


def test_worst_first(tmp_path: Path, weights: Weights) -> None:
    a, b, c, d, e = list(weights)[3:8]
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed[a] *= 1.01
    changed[b] *= 1.5
    changed[c] = torch.zeros(3)
    changed[d].flatten()[0] = math.nan
    changed[e] *= 1.001
    comparison = compared(TINY, released(tmp_path / "b", changed))
    assert [difference.name for difference in comparison.differences] == [c, d, b, a, e]
    assert [difference.name for difference in comparison.beyond(0.1)] == [c, d, b]


# ------------------------------------------------------------------------------------ configuration


def test_fields_that_differ(tmp_path: Path, weights: Weights) -> None:
    config = {**json.loads((TINY / CONFIG).read_text()), "moe_top_k": 2, "sliding_window": 7}
    config["swiglu_limits"] = [0.0] * 8 + [2.0] + [0.0] * 3
    comparison = compared(TINY, released(tmp_path / "b", weights, config))
    assert comparison.fields is not None and comparison.differences == []
    assert {(field.key, field.a, field.b) for field in comparison.fields} == {
        ("model.moe.top_k", 3, 2),
        ("model.sliding.window", 6, 7),
        ("model.clamp.routed.7", 1.0, "absent"),
        ("model.clamp.routed.8", 1.0, 2.0),
    }
    assert not comparison.is_same(math.inf)


def test_what_a_released_config_cannot_say_is_compared_between_checkpoints_only(
    tmp_path: Path, weights: Weights
) -> None:
    started = model().model_dump()
    started["init"]["std"] = 0.5
    started["mtp"]["chain"] = "post_norm"
    other = checkpoint(tmp_path / "other", weights, ModelConfig.model_validate(started))
    plain = checkpoint(tmp_path / "plain", weights, model())

    def keys(one: Path, two: Path) -> list[str]:
        return [field.key for field in compared(one, two).fields or []]

    assert sorted(keys(plain, other)) == ["model.init.std", "model.mtp.chain"]
    assert keys(TINY, other) == ["model.mtp.chain"]
    assert keys(TINY, plain) == []


def test_a_shared_head_is_the_same_as_its_copies(tmp_path: Path, weights: Weights) -> None:
    """A checkpoint whose depths share the output matrix, against the released folder that holds it four times."""
    copies = {n: weights[HEAD].clone() if n.endswith("shared_head.output.weight") else weights[n] for n in weights}
    fields = model().model_dump()
    fields["mtp"]["head"] = "shared"
    shared = checkpoint(tmp_path / "shared", copies, ModelConfig.model_validate(fields))
    for one, other in ((shared, released(tmp_path / "copies", copies)), (tmp_path / "copies", shared)):
        assert compared(one, other) == Comparison([], [], [], [], NUM_TENSORS, [])
    depths = {f"model.layers.{layer}.transformer.shared_head.output.weight" for layer in (9, 10, 11)}
    assert {difference.name for difference in compared(shared, TINY).differences} == depths


def test_reading_ahead_changes_nothing(tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "saved", weights, model())
    reads: list[int] = []
    read = StoredMatrices.read

    def counted(self: StoredMatrices, names: Iterable[str]) -> Weights:
        names = list(names)
        reads.append(len(names))
        return read(self, names)

    monkeypatch.setattr(StoredMatrices, "read", counted)
    assert compared(folder, TINY).is_same()
    assert reads == [NUM_TENSORS]
    reads.clear()
    monkeypatch.setattr(compare_sources, "READ_AHEAD_BYTES", weights[GATE].numel() * 4)
    assert compared(folder, TINY).is_same()
    assert sum(reads) == NUM_TENSORS and 10 < len(reads) < NUM_TENSORS and 1 in reads


def test_attention_sinks_have_their_own_names(tmp_path: Path, weights: Weights) -> None:
    """The released layout has none for them; two checkpoints of such a model can be compared all the same."""
    fields = model().model_dump()
    fields["layout"] += "+sink"
    config = ModelConfig.model_validate(fields)
    sinks = {p.name: p.shape for p in model_spec(config).parameters() if p.name.endswith(".sink")}
    zeros, ones = (
        checkpoint(tmp_path / str(value), weights, config, {n: torch.full(s, value) for n, s in sinks.items()})
        for value in (0.0, 1.0)
    )
    comparison = compared(zeros, ones)
    assert {difference.name for difference in comparison.differences} == sinks.keys()
    assert comparison.compared == NUM_TENSORS + 12 and comparison.fields == []


# --------------------------------------------------------------------------------------- bad input


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no weights: expected safetensors"):
        open_source(tmp_path)
    with pytest.raises(UserError, match="holds no weights"):
        open_source(tmp_path / "missing")
    (tmp_path / SINGLE).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        open_source(tmp_path)


# ------------------------------------------------------------------------------------- the command

app = typer.Typer(cls=LazyGroup)


@app.callback()
def _group() -> None:
    pass


app.command()(compare)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> Path:
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed[Q] *= 1.5
    changed[GATE][0, 0, 0] = math.nan
    changed[BIAS] = changed[BIAS][:7]
    del changed["model.norm.weight"]
    return released(tmp_path_factory.mktemp("other") / "model", changed)


def test_exit_codes(tmp_path: Path, other: Path) -> None:
    assert run(TINY, TINY).exit_code == 0
    assert run(TINY, other).exit_code == 1
    assert run(TINY, tmp_path).exit_code == 2
    assert run(TINY, TINY, "--tolerance", "-1").exit_code == 2
    assert run(TINY, TINY, "--tolerance", "nan").exit_code == 2


def test_the_report(other: Path) -> None:
    lines = run(TINY, other).output.splitlines()
    assert lines[:2] == [f"A  {TINY} (released layout)", f"B  {other} (released layout)"]
    assert "Configuration: the same" in lines and lines[-1] == "different"
    assert f"Tensors in both: {NUM_TENSORS - 1}, {NUM_TENSORS - 4} the same bit by bit, 3 different" in lines
    heading = next(number for number, line in enumerate(lines) if line.split()[:2] == ["tensor", "differing"])
    bias, gate, q = (line.split(maxsplit=5) for line in lines[heading + 1 : heading + 4])
    assert bias[0] == BIAS and " ".join(bias[1:]) == "shape [8] in A, [7] in B"
    assert gate == [GATE, "1", "16,384", "0", "0", "NaNs: 0 in A, 1 in B"]
    assert q[0] == Q and q[1:3] == ["6,144", "6,144"] and q[4] == "0.5"
    assert lines[lines.index("Only in A: 1") + 1] == "  model.norm.weight"


def test_the_limit(other: Path) -> None:
    output = run(TINY, other, "--limit", "1").output
    assert BIAS in output and Q not in output and "and 2 more (--limit)" in output


def test_a_tolerance_is_reported(tmp_path: Path, weights: Weights) -> None:
    close = released(tmp_path / "b", {**weights, Q: weights[Q] * 1.001})
    result = run(TINY, close, "--tolerance", "0.01")
    assert result.exit_code == 0 and "1 within the tolerance 0.01, 0 different" in result.output
    assert result.output.splitlines()[-1] == "the same"


def test_json(other: Path) -> None:
    result = run(TINY, other, "--json", "--limit", "1", "--tolerance", "0.6")
    content = json.loads(result.stdout)
    assert result.exit_code == 1 and content["same"] is False and content["configuration"] == []
    assert (content["compared"], content["identical"]) == (NUM_TENSORS - 1, NUM_TENSORS - 4)
    assert content["only_in_a"] == ["model.norm.weight"] and content["only_in_b"] == content["not_compared"] == []
    assert [entry["tensor"] for entry in content["differences"]] == [BIAS, GATE, Q]
    assert [entry["within_tolerance"] for entry in content["differences"]] == [False, False, True]
    assert content["differences"][2]["relative"] == pytest.approx(0.5)
    assert "relative" not in content["differences"][0]
