"""Rules of ``train.recompute``: which layers they name, what a layer recomputes, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron.config.checks import check
from steptron.config.loader import load
from steptron.config.recompute import parse_layers
from steptron.config.schema import RecomputeRuleConfig
from steptron.errors import ConfigError
from steptron.model.layer_spec import LayerSpec, model_spec
from tests.config.samples import MINIMAL, write

# 9 layers: full 0, 4, 8; the first two dense; 2 MTP depths, which are sliding and dense.
NINE_LAYERS = ["model.num_layers=9", "model.num_dense_layers=2", "model.mtp.depths=2", "loss.mtp_train_depths=2"]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def layers(*rules: tuple[str, list[str]], overrides: list[str] = NINE_LAYERS) -> list[LayerSpec]:
    """The layers of the sample, MTP depths last."""
    config = load(write(Path(), "run.yaml", MINIMAL), overrides).config
    spec = model_spec(config.model, [RecomputeRuleConfig(layers=text, parts=parts) for text, parts in rules])  # type: ignore[arg-type]
    return [*spec.layers, *(depth.layer for depth in spec.mtp)]


def named(text: str) -> list[int]:
    """Places in ``layers()`` that a rule reaches."""
    return [i for i, layer in enumerate(layers((text, ["attention"]))) if "attention" in layer.recompute]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("all", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("full", [0, 4, 8]),
        ("sliding", [1, 2, 3, 5, 6, 7, 9, 10]),
        ("dense", [0, 1, 9, 10]),
        ("moe", [2, 3, 4, 5, 6, 7, 8]),
        ("mtp", [9, 10]),
        ("0", [0]),
        ("8", [8]),
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("2-2", [2]),
        (" 1 , 3-4 ", [1, 3, 4]),
        ("3-5,4", [3, 4, 5]),
        ("mtp,full,1", [0, 1, 4, 8, 9, 10]),
        ("00", [0]),
        ("0-999999999", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_layers_that_a_rule_names(text: str, expected: list[int]) -> None:
    assert named(text) == expected


@pytest.mark.parametrize("item", ["", "everything", "ALL", "-1", "1-", "-", "0:3", "1.5", "٣", "1-2-3", "9999999999"])
def test_layers_that_cannot_be_read(item: str) -> None:
    with pytest.raises(ValueError, match="expected all, full, sliding, dense, moe, mtp, or decoder layers by number"):
        parse_layers(f"0,{item}")


def test_empty_range() -> None:
    with pytest.raises(ValueError, match="'8-3' has the range 8-3, which is empty: write 3-8"):
        parse_layers("8-3")


def test_rules_add_up() -> None:
    parts = [layer.recompute for layer in layers(("all", ["norm"]), ("0-2", ["activation"]), ("2", ["attention"]))]
    assert parts[0] == parts[1] == {"norm", "activation"}
    assert parts[2] == {"norm", "activation", "attention"}
    assert set(parts[3:]) == {frozenset({"norm"})}


def test_without_rules_nothing_is_recomputed() -> None:
    assert all(not layer.recompute for layer in layers())


@pytest.mark.parametrize(
    "parts, dense, moe",
    [
        (["moe_permutation", "activation"], {"activation"}, {"moe_permutation", "activation"}),
        (["ffn", "activation", "moe_permutation"], {"ffn"}, {"ffn"}),
        (["ffn", "norm"], {"ffn", "norm"}, {"ffn", "norm"}),
        (["attention", "norm"], {"attention", "norm"}, {"attention", "norm"}),
        (["attention", "ffn", "norm"], {"attention", "ffn"}, {"attention", "ffn"}),
    ],
)
def test_parts_inside_others_are_left_out(parts: list[str], dense: set[str], moe: set[str]) -> None:
    """Also where they come from several rules; a dense layer has no token copies."""
    together = layers(("all", parts))
    apart = layers(*(("all", [part]) for part in parts))
    assert together[0].recompute == apart[0].recompute == together[-1].recompute == dense
    assert together[2].recompute == apart[2].recompute == moe


def problems(*overrides: str) -> tuple[str, ...]:
    """Problems of the sample: 5 layers, the first dense, no MTP."""
    with pytest.raises(ConfigError) as caught:
        check(load(write(Path(), "run.yaml", MINIMAL), overrides).config, 1, "cpu")
    return caught.value.problems


@pytest.mark.parametrize(
    "rules, overrides, problem",
    [
        (
            "[{layers: some, parts: [ffn]}]",
            [],
            "train.recompute.0.layers: 'some' names layers by 'some': expected all, full, sliding, dense, moe, mtp, or "
            "decoder layers by number such as 0-3,8",
        ),
        (
            "[{parts: [norm]}, {layers: 2-5, parts: [ffn]}]",
            [],
            "train.recompute.1.layers (2-5) names layer 5, but model.num_layers is 5: decoder layers are numbered 0 to "
            "4, and MTP depths are named by mtp",
        ),
        (
            "[{layers: '7', parts: [moe_permutation]}]",
            [],
            "train.recompute.0.layers (7) names layer 7, but model.num_layers is 5: decoder layers are numbered 0 to "
            "4, and MTP depths are named by mtp",
        ),
        (
            "[{layers: mtp, parts: [ffn]}]",
            [],
            "train.recompute.0.layers (mtp) names mtp layers, but the model trains none (model.layout is "
            "S3F1+heads+gate, model.num_dense_layers 1 of 5, loss.mtp_train_depths 0): leave it out",
        ),
        (
            "[{layers: 'full,mtp', parts: [ffn]}]",
            ["model.mtp.depths=1", "loss.mtp_train_depths=0"],
            "train.recompute.0.layers (full,mtp) names mtp layers, but the model trains none (model.layout is "
            "S3F1+heads+gate, model.num_dense_layers 1 of 5, loss.mtp_train_depths 0): leave it out",
        ),
        (
            "[{layers: sliding, parts: [ffn]}]",
            ["model.layout=FFFF"],
            "train.recompute.0.layers (sliding) names sliding layers, but the model trains none (model.layout is "
            "FFFF, model.num_dense_layers 1 of 5, loss.mtp_train_depths 0): leave it out",
        ),
        (
            "[{layers: '0', parts: [norm, moe_permutation]}]",
            [],
            "train.recompute.0.parts has moe_permutation, but train.recompute.0.layers (0) names no MoE layer: MoE "
            "layers are 1 to 4",
        ),
        (
            "[{parts: [ffn, norm, ffn]}]",
            [],
            "train.recompute.0.parts names ffn twice: once is enough, or another part was meant",
        ),
    ],
)
def test_refused(rules: str, overrides: list[str], problem: str) -> None:
    assert problems(f"train.recompute={rules}", *overrides) == (problem,)


def test_a_layout_that_cannot_be_read_is_reported_once() -> None:
    assert len(problems("train.recompute=[{parts: [ffn]}]", "model.layout=S999999999F1")) == 1


@pytest.mark.parametrize(
    "rules",
    [
        "[]",
        "[{parts: [ffn]}, {parts: [ffn]}]",  # the same twice
        "[{layers: '0,0-2,moe', parts: [norm]}]",  # layers named twice
        "[{parts: [activation]}, {layers: 0-2, parts: [ffn]}]",  # a part inside another one
        "[{parts: [moe_permutation]}]",  # dense layers among those named
    ],
)
def test_accepted(rules: str) -> None:
    check(load(write(Path(), "run.yaml", MINIMAL), [f"train.recompute={rules}"]).config, 1, "cpu")


@pytest.mark.parametrize(
    "rule, field", [("{parts: []}", "parts"), ("{parts: [mlp]}", "parts"), ("{layers: 3, parts: [ffn]}", "layers")]
)
def test_refused_by_the_schema(rule: str, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.recompute\.0\.{field}"):
        load(write(Path(), "run.yaml", MINIMAL), [f"train.recompute=[{rule}]"])
