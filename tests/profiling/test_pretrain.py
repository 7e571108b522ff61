"""`steptron pretrain --profile`, as a user runs it."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steptron.checkpoint.folder import list_checkpoints
from steptron.cli.main import app
from steptron.platform import launch
from steptron.profiling.categories import Category
from steptron.profiling.phases import PHASES
from steptron.train.stop import STOPPED_EXIT_CODE
from tests.data.corpora import build_small, varied_texts
from tests.end_to_end.runs import REPOSITORY, TIMEOUT_SECONDS, environment, pretrain_arguments, steptron

FILES = {"memory.json", "memory.png", "summary.md", "trace.json.gz"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [{"text": text} for text in varied_texts(200)]
    return build_small(tmp_path_factory.mktemp("corpus"), "data", records)


def shares(page: str, names: Iterable[str]) -> dict[str, float]:
    """Per cent by name, of the page's tables by category and by phase."""
    found = re.findall(r"^\| (\S.*?) +\| +([\d.]+) % \|", page, re.MULTILINE)
    return {name: next(float(value) for row, value in found if row == name) for name in names}


def arguments_of(data: Path, output: Path, steps: int, *overrides: str) -> list[str]:
    """A step of one micro-batch, whose profile is small."""
    return pretrain_arguments(data, output, steps, "train.micro_batch_size=8", *overrides)


def check(folder: Path) -> str:
    """The files of one rank are whole; returns the page."""
    assert {path.name for path in folder.iterdir()} == FILES
    page = (folder / "summary.md").read_text()
    kinds = shares(page, (category.value for category in Category))
    phases = shares(page[page.index("| phase") :], PHASES)
    assert sum(kinds.values()) == pytest.approx(100, abs=0.6)
    assert sum(phases.values()) == pytest.approx(100, abs=0.6)
    for found, names in ((kinds, ("matrix products", "attention")), (phases, ("forward", "backward"))):
        # How large they are depends on how busy the machine is.
        assert min(found[name] for name in names) > 0, page
    assert kinds["other operators"] < 1, page
    with gzip.open(folder / "trace.json.gz") as stream:
        names = [event.get("name") for event in json.load(stream)["traceEvents"]]
    for phase in ("data", "forward", "gradient reduction", "optimizer", "parameter gather"):
        assert names.count(f"steptron::{phase}") == names.count("steptron::step") > 0, phase
    memory = json.loads((folder / "memory.json").read_text())
    assert memory["peak_bytes"] > memory["alive_before_bytes"] > 0 and memory["peak_phase"] in ("forward", "backward")
    return page


def bytes_before(folder: Path) -> int:
    """Bytes of the tensors that were alive before the profile."""
    return int(json.loads((folder / "memory.json").read_text())["alive_before_bytes"])


def test_two_processes(data: Path, tmp_path: Path) -> None:
    """Ranks of a pipeline with split experts write their own folders; one prints."""
    output = tmp_path / "run"
    arguments = arguments_of(data, output, 3, "parallel.expert=2", "train.micro_batch_size=4")
    done = steptron(*arguments, "--nproc", "2", "--profile", "2", "--profile-ranks", "0-1")
    pages = {path: check(path) for path in (output / "profile").glob("*/rank*")}
    assert len(pages) == 2
    for path, page in pages.items():
        assert shares(page, ["communication"])["communication"] > 0
        assert (page in done.stdout) == (path.name == "rank0")


def test_a_run_profiles_is_stopped_in_a_window_and_goes_on(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    profile = ("--profile", "2-3,5-90000", "--profile-ranks", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "steptron", *arguments_of(data, output, 100000), *profile],
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _wait_for_steps(output, 5, process)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == STOPPED_EXIT_CODE, text
    page = check(output / "profile" / "steps-2-3" / "rank0")
    assert page in text and "2 steps in" in page and "times the" in page and page.count("\n") < 66
    assert "warning" not in text
    # nano: parameters, gradients and momentum, or two moments, in float32.
    assert bytes_before(output / "profile" / "steps-2-3" / "rank0") > 746_232 * 12
    (checkpoint,) = list_checkpoints(output)
    step = json.loads((checkpoint / "steptron.json").read_text())["progress"]["step"]
    assert f"\n{step - 4} step" in check(output / "profile" / "steps-5-90000" / "rank0")
    last = ("--profile", f"2-{step + 1}")
    again = steptron(*arguments_of(data, output, step + 1), *last)
    assert f"--profile: steps 2-{step} are already done and cannot be profiled" in again.stdout
    assert check(output / "profile" / f"step-{step + 1}" / "rank0") in again.stdout


def _wait_for_steps(output: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    log = output / "log.jsonl"
    while not log.exists() or log.read_text().count("\n") < steps:
        assert process.poll() is None, f"ended early: {process.communicate()[0]}"
        assert time.monotonic() < deadline, f"no {steps} steps within {TIMEOUT_SECONDS} s"
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "5"], "--profile 5: the run ends with step 4 (train.steps)"),
        (["--profile", "two"], "--profile 'two'"),
        (["--profile", "2", "--profile-ranks", "1"], "--profile-ranks 1: the run has 1 process"),
        (["--profile-ranks", "0"], "add --profile"),
    ],
)
def test_refused_before_any_work(options: list[str], message: str, data: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*pretrain_arguments(data, tmp_path / "run", 4), *options])
    assert result.exit_code == 2 and message in result.stderr
    assert not (tmp_path / "run").exists()


def test_local_processes_get_the_options(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed, again = [], []

    def run_local(nproc: int, arguments: list[str], *, restart_arguments: list[str], **others: object) -> int:
        handed.append(arguments)
        again.append(restart_arguments)
        return 0

    monkeypatch.setattr(launch, "run_local", run_local)
    arguments = pretrain_arguments(data, tmp_path / "run", 4, "parallel.expert=2")
    options = ["--fresh", "--profile", "2,3-4", "--profile-ranks", "1"]
    assert CliRunner().invoke(app, [*arguments, "--nproc", "2", *options]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--nproc", "2"]).exit_code == 0
    assert handed == [[*arguments, *options], arguments]
    assert again == [[*arguments, *options[1:]], arguments]
