from __future__ import annotations

import json
from pathlib import Path

import pytest

from steptron.config.checks import check, smallest_world_size
from steptron.config.loader import load
from steptron.config.show import render, render_json, to_yaml
from tests.config.samples import MINIMAL, write

PRETRAIN = Path(__file__).parents[2] / "configs" / "pretrain"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_value_stands_with_its_source() -> None:
    write(Path(), "whole.yaml", MINIMAL)
    write(Path(), "run.yaml", "base: whole.yaml\nmodel: {clamp: {routed: {4: 7}}}")
    text = render(load(Path("run.yaml"), ["train.steps=3", "train.output='1e-3'"]))
    lines = [line.split("  # ") for line in text.splitlines()]
    stripped = {(line[0].strip(), line[1]) for line in lines if len(line) == 2}
    assert stripped >= {
        ("vocab_size: 512", "whole.yaml:2"),
        ("theta: 10000.0", "whole.yaml:8"),
        ("4: 7.0", "run.yaml:2"),
        ("- path: runs/a", "whole.yaml:13"),
        ("weight: 1.0", "default"),
        ("weight: 3.0", "whole.yaml:15"),
        ("validation: []", "default"),
        ("shared: {}", "default"),
        ("batch_ramp: null", "default"),
        ("steps: 3", "override"),
        ("output: '1e-3'", "override"),
    }
    assert [line[0] for line in lines if len(line) == 1][:4] == ["model:", "  full:", "    rope:", "  sliding:"]
    assert len({line.index("# ") for line in text.splitlines() if "# " in line}) == 1, "comments are aligned"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            "train.batch_ramp={start: 2, increment: 2, sequences: 8}",
            "model.clamp={routed: {3: 1, 4: 2}, shared: {4: 1.5}}",
        ],
        ["balance.freeze_router=true"],
        ["model.mtp.depths=2", "model.full.rope.scaling={factor: 2, original_length: 64}"],
        [
            "optimizer.schedule={kind: staged, "
            "segments: [{steps: 5, end_lr: 1e-4}, {steps: 5, kind: linear, end_lr: 0}]}"
        ],
        # Text that YAML 1.1 writes without quotes, and that the core schema reads as a number.
        ["train.output='1e3'", "train.logging.wandb_project='08'"],
        ["train.output='on # a: b'", "train.logging.wandb_project='null'", "optimizer.lr=1e-17"],
        [f"train.output={'x' * 100}"],
    ],
)
def test_the_output_loads_back(overrides: list[str]) -> None:
    loaded = load(write(Path(), "run.yaml", MINIMAL), overrides)
    again = load(write(Path(), "shown.yaml", render(loaded)))
    assert again.config == loaded.config
    assert [one.keys() for one in again.sources] == [one.keys() for one in loaded.sources]
    assert load(write(Path(), "restored.yaml", to_yaml(loaded.config))).config == loaded.config


@pytest.mark.parametrize("file", sorted(PRETRAIN.glob("*.yaml")), ids=lambda file: file.stem)
def test_presets_load_back(file: Path) -> None:
    loaded = load(file)
    shown, restored = write(Path(), "shown.yaml", render(loaded)), write(Path(), "kept.yaml", to_yaml(loaded.config))
    assert load(shown).config == load(restored).config == loaded.config
    # What was left out is accepted as it is written out.
    for each in (file, shown, restored):
        config = load(each).config
        check(config, smallest_world_size(config.parallel), "cpu")


def test_json() -> None:
    shown = json.loads(render_json(load(write(Path(), "run.yaml", MINIMAL), ["train.steps=3"])))
    assert shown["config"]["train"]["steps"] == 3 and shown["config"]["train"]["output"] == "runs/out"
    assert shown["sources"]["train.steps"] == {"kind": "override", "file": None, "line": None, "text": "train.steps=3"}
    assert shown["sources"]["model.hidden_size"] == {"kind": "file", "file": "run.yaml", "line": 3, "text": None}
    assert shown["sources"]["train.seed"]["kind"] == "default"
