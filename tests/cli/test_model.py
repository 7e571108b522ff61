"""`steptron model show`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steptron.cli.main import app
from steptron.config.schema import ModelConfig
from steptron.model.layer_spec import model_spec
from steptron.planning import built

CONFIGS = Path(__file__).parents[2] / "configs"
FLASH = CONFIGS / "model" / "step3p5-flash.yaml"
RELEASED_FIGURES = ("196,956,130,368", "809,390,336", "199,384,301,376", "10,931,407,936  10.93B")


def spec_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in model_spec(model).parameters()}


@pytest.fixture
def shapes_of_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the build: it needs a process of its own."""
    monkeypatch.setattr(built, "built_shapes", spec_shapes)


def show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["model", "show", *map(str, arguments)])


def figure(output: str, name: str) -> str:
    (line,) = (line for line in output.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()[0]


def test_the_released_model_as_it_is_really_built() -> None:
    """In a process of its own, through the command's whole path."""
    result = subprocess.run(
        [sys.executable, "-c", "from steptron.cli.main import main; main()", "model", "show", str(FLASH)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=CONFIGS.parent,
        env=os.environ | {"PYTHONPATH": str(CONFIGS.parent)},
    )
    assert result.returncode == 0, result.stderr
    for text in RELEASED_FIGURES:
        assert text in result.stdout


@pytest.mark.usefixtures("shapes_of_specs")
def test_the_table_of_the_released_model() -> None:
    result = show(FLASH)
    assert result.exit_code == 0, result.output
    for text in RELEASED_FIGURES:
        assert text in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["44", "1", "full", "64/8", "x", "128", "-", "5e6,", "64/128,", "scaled", "gate"] in [
        row[:11] for row in rows
    ]
    assert ["43", "1", "sliding", "96/8", "x", "128", "512", "1e4,", "128/128", "gate"] in [row[:10] for row in rows]
    assert "routed 7, shared 16" in result.stdout
    assert result.stdout.count("809,390,336") == 6
    assert "sequence length 4,096 (assumed)" in result.stdout


@pytest.mark.usefixtures("shapes_of_specs")
def test_overrides_change_the_counts() -> None:
    wider = show(FLASH, "model.moe.expert_hidden_size=1288")
    more = 42 * 288 * 3 * 4096 * 8
    assert figure(wider.stdout, "main model") == f"{196_956_130_368 + more:,}"
    active = 42 * 8 * 3 * 4096 * 8
    assert figure(wider.stdout, "without embedding and output matrix") == f"{10_931_407_936 + active:,}"
    assert figure(wider.stdout, "routed experts") == f"{6 * 42 * 8 * 3 * 4096 * 1288:,}"


@pytest.mark.usefixtures("shapes_of_specs")
def test_a_whole_configuration_gives_its_own_sequence_length(tmp_path: Path) -> None:
    file = tmp_path / 'run "1".yaml'
    file.write_text(
        f"base: {CONFIGS / 'model' / 'nano.yaml'}\n"
        "data: {train: [{path: corpus}], sequence_length: 96}\n"
        "optimizer: {lr: 1e-3}\n"
        "train: {output: out, steps: 1, global_batch_size: 1, micro_batch_size: 1}\n"
        "loss: {mtp_train_depths: 0}\n"
    )
    result = show(file)
    assert result.exit_code == 0, result.output
    assert "sequence length 96, MTP depths in training 0" in result.stdout
    assert figure(result.stdout, "mtp projections") == "0"
    longer = show(file, "data.sequence_length=192")
    assert "sequence length 192," in longer.stdout


@pytest.mark.usefixtures("shapes_of_specs")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.hidden_sizee=3"], "model.hidden_sizee is not a known key"),
        (["model.layout=S4"], "layout 'S4' is not understood"),
        (["loss.mtp_train_depths=7"], "loss.mtp_train_depths"),
    ],
)
def test_bad_models_are_refused_in_one_message(overrides: list[str], message: str) -> None:
    result = show(FLASH, *overrides)
    assert result.exit_code == 2
    assert message in result.stderr
    assert str(FLASH) in result.stderr
    assert "wrapper" not in result.stderr


def test_a_missing_file_is_named() -> None:
    result = show("no/such/model.yaml")
    assert result.exit_code == 2
    assert "no/such/model.yaml" in result.stderr


def test_a_model_that_is_built_otherwise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrower(model: ModelConfig) -> dict[str, tuple[int, ...]]:
        return spec_shapes(model) | {"head.weight": (1, 1)}

    monkeypatch.setattr(built, "built_shapes", narrower)
    result = show(FLASH)
    assert isinstance(result.exception, ValueError)
    assert "head.weight is built as (1, 1)" in str(result.exception)


def test_a_name_that_no_file_can_have() -> None:
    name = "x" * 5000
    result = show(name)
    assert (result.exit_code, result.stderr) == (2, f"{name}: there is no such file\n")
