from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from steptron import __version__
from steptron.cli.main import app
from steptron.errors import UserError
from tests.config.samples import MINIMAL, write

CONFIGS = Path(__file__).parents[2] / "configs"
HEAVY = ("torch", "megatron", "numpy", "pydantic", "yaml", "steptron.config", "steptron.train")

runner = CliRunner()


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPTRON_DEBUG", raising=False)


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter that sees this checkout; returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(CONFIGS.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_is_light() -> None:
    code = f"import sys, steptron; print([m for m in sys.modules if m.partition('.')[0] in {HEAVY[:5]!r}])"
    assert run_python(code).strip() == "[]"


def test_help_imports_no_command() -> None:
    code = f"""
import sys
from steptron.cli.main import main
sys.argv = ["steptron", "--help"]
try:
    main()
except SystemExit as end:
    assert end.code == 0
loaded = [m for m in sys.modules if any(m == h or m.startswith(h + ".") for h in {HEAVY!r})]
print("LOADED", loaded, [m for m in sys.modules if m.startswith("steptron.cli.")])
"""
    output = run_python(code)
    assert output.splitlines()[-1] == "LOADED [] ['steptron.cli.lazy', 'steptron.cli.main']"
    for command in ("pretrain", "generate", "data", "config", "model", "doctor", "version"):
        assert f" {command} " in output
    assert "Pre-train a model." in output


def test_without_arguments_the_help_is_shown() -> None:
    assert "Commands" in runner.invoke(app, []).output
    assert "Usage: steptron" in run_python("import subprocess, sys; subprocess.run([sys.executable, '-m', 'steptron'])")


def test_version() -> None:
    result = runner.invoke(app, ["version"])
    assert result.exit_code == 0
    assert result.output.splitlines()[0] == f"steptron {__version__}"
    assert [line.split()[0] for line in result.output.splitlines()] == ["steptron", "torch", "megatron-core"]


def test_a_mistyped_command_is_named_with_the_nearest() -> None:
    result = runner.invoke(app, ["pretrian"])
    assert result.exit_code == 2
    assert "No such command 'pretrian'" in result.output and "pretrain" in result.output


# ----------------------------------------------------------------------------------------- errors


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a command that raises in the place of `steptron doctor`, and a Typer app in that of `data`."""

    def doctor(kind: str = "user") -> None:
        if kind == "user":
            raise UserError("the [file] x.yaml is wrong")
        raise RuntimeError("a bug")

    group = typer.Typer()

    @group.command()
    def build() -> None:
        raise UserError("no corpus")

    @group.command()
    def inspect(name: str) -> None:
        typer.echo(f"inspected {name}")

    monkeypatch.setitem(sys.modules, "steptron.cli.doctor", types.SimpleNamespace(doctor=doctor))
    monkeypatch.setitem(sys.modules, "steptron.cli.data", types.SimpleNamespace(app=group))


@pytest.mark.usefixtures("failing")
def test_user_errors_are_one_message() -> None:
    result = runner.invoke(app, ["doctor"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "the [file] x.yaml is wrong\n")
    result = runner.invoke(app, ["data", "build"])
    assert (result.exit_code, result.stderr) == (2, "no corpus\n")
    assert runner.invoke(app, ["doctor"], color=True).stderr.startswith("\x1b[31m")


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("way", ["option", "environment"])
def test_debug_shows_the_traceback(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "environment":
        monkeypatch.setenv("STEPTRON_DEBUG", "1")
    result = runner.invoke(app, [*(["--debug"] if way == "option" else []), "doctor"])
    assert isinstance(result.exception, UserError)


@pytest.mark.usefixtures("failing")
def test_other_errors_keep_their_traceback() -> None:
    assert isinstance(runner.invoke(app, ["doctor", "--kind", "bug"]).exception, RuntimeError)


@pytest.mark.usefixtures("failing")
def test_groups_and_functions_are_loaded_when_called() -> None:
    result = runner.invoke(app, ["data", "inspect", "x"])
    assert (result.exit_code, result.output) == (0, "inspected x\n")
    assert "--kind" in runner.invoke(app, ["doctor", "--help"]).output


# ----------------------------------------------------------------------------------------- config


def test_config_check() -> None:
    file = str(CONFIGS / "pretrain" / "nano.yaml")
    result = runner.invoke(app, ["config", "check", file, "parallel.expert=2", "--world-size", "4"])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"ok: {file} on 4 processes",
        "  model     9 layers, 1 MTP, hidden 64, 8 experts top 2, S3F1+heads+gate",
        "  parallel  pipeline 1 x data 4; experts over 2",
        "  batch     16 sequences of 128 tokens: 2 x 2 per rank",
        "  training  100 steps, muon, fp32",
    ]


def test_config_check_takes_the_fewest_processes_by_default() -> None:
    result = runner.invoke(app, ["config", "check", str(CONFIGS / "pretrain" / "step3p5-flash.yaml")])
    assert result.exit_code == 0
    assert result.output.splitlines()[0].endswith("on 64 processes")
    assert "16,384 sequences (from 4,096) of 4,096 tokens: 2048 x 1 per rank" in result.output


def test_config_check_refuses_with_exit_code_2() -> None:
    file = str(write(Path(), "run.yaml", MINIMAL))
    result = runner.invoke(app, ["config", "check", file, "train.stepz=3"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean train.steps?" in result.stderr and "Traceback" not in result.stderr
    result = runner.invoke(app, ["config", "check", file, "--world-size", "3", "parallel.pipeline=2"])
    assert result.exit_code == 2 and "the number of processes (3) must be a multiple" in result.stderr
    result = runner.invoke(app, ["config", "check", file, "--data"])
    assert result.exit_code == 2 and "data.train.0.path (runs/a) does not exist" in result.stderr
    assert runner.invoke(app, ["config", "check", file, "train.device=cuda", "--device", "cpu"]).exit_code == 2
    assert runner.invoke(app, ["config", "check", file, "train.device=cuda", "--device", "cuda"]).exit_code == 0


def test_config_show() -> None:
    file = str(write(Path(), "run.yaml", MINIMAL))
    result = runner.invoke(app, ["config", "show", file, "train.steps=3"])
    assert result.exit_code == 0
    assert "  hidden_size: 64 " in result.output and "# run.yaml:3\n" in result.output
    assert result.output.endswith("# default\n") and not result.output.endswith("\n\n")
    shown = json.loads(runner.invoke(app, ["config", "show", file, "--json"]).output)
    assert shown["config"]["train"]["steps"] == 10
