"""tools/quickstart.py: which steps run, which are reused, and how their commands are run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from steptron.config.loader import load
from steptron.train.records import ValidationRecord, to_json
from tools.quickstart import (
    CONFIG,
    DEFAULT_FOLDER,
    REPOSITORY,
    Command,
    Quickstart,
    Step,
    StepFailedError,
    duration,
    main,
    parse_arguments,
    run_process,
    run_steps,
    shown,
)


@dataclass
class FakeRunner:
    """Stands for running `steptron`: each command writes the file that its second word names."""

    failing: str | None = None
    idle: str | None = None
    ran: list[str] = field(default_factory=list)

    def __call__(self, command: Command, log: Path) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"output of {command[0]}\n")
        self.ran.append(command[0])
        if command[0] == self.failing:
            return 3
        if command[0] != self.idle:
            result = Path(command[1])
            result.write_text(result.read_text() + "+" if result.exists() else command[0])
        return 0


@pytest.fixture
def steps(tmp_path: Path) -> list[Step]:
    return [
        Step("first", "The first", ("make-first", str(tmp_path / "a")), (tmp_path / "a",)),
        Step("second", "The second", ("make-second", str(tmp_path / "b")), (tmp_path / "b",), resumable=True),
        Step("third", "The third", ("show", str(tmp_path / "c")), (), shows_result=True),
    ]


ALL = ["make-first", "make-second", "show"]


def rerun(steps: list[Step], folder: Path) -> list[str]:
    runner = FakeRunner()
    run_steps(steps, folder, runner)
    return runner.ran


def test_a_second_run_reuses_everything_and_says_so(
    steps: list[Step], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rerun(steps, tmp_path) == ALL
    capsys.readouterr()
    assert rerun(steps, tmp_path) == []
    output = capsys.readouterr().out
    assert output.count("reused") == 3
    assert "output of show" in output
    assert "output of make-first" not in output


def test_a_lost_result_is_made_again_with_all_that_came_from_it(steps: list[Step], tmp_path: Path) -> None:
    rerun(steps, tmp_path)
    (tmp_path / "a").unlink()
    assert rerun(steps, tmp_path) == ALL
    assert (tmp_path / "b").read_text() == "make-second"  # from nothing: the old one was made from the lost input


def test_a_changed_command_is_run_with_all_that_comes_after(steps: list[Step], tmp_path: Path) -> None:
    rerun(steps, tmp_path)
    steps[1] = replace(steps[1], command=(*steps[1].command, "--more"))
    assert rerun(steps, tmp_path) == ALL[1:]
    assert (tmp_path / "b").read_text() == "make-second+"  # went on from the old one


def test_what_was_interrupted_resumes_if_it_can(steps: list[Step], tmp_path: Path) -> None:
    class Interruption(Exception):
        pass

    def interrupted_in_second(command: Command, log: Path) -> int:
        if command[0] == "make-second":
            (tmp_path / "b").write_text("half")
            raise Interruption
        return FakeRunner()(command, log)

    with pytest.raises(Interruption):
        run_steps(steps, tmp_path, interrupted_in_second)
    assert rerun(steps, tmp_path) == ALL[1:]
    assert (tmp_path / "b").read_text() == "half+"


def test_what_was_interrupted_and_cannot_resume_starts_afresh(steps: list[Step], tmp_path: Path) -> None:
    def killed(command: Command, log: Path) -> int:
        (tmp_path / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_steps(steps, tmp_path, killed)
    assert rerun(steps, tmp_path) == ALL
    assert (tmp_path / "a").read_text() == "make-first"


def test_a_failing_step_names_its_log_and_ends_the_run(steps: list[Step], tmp_path: Path) -> None:
    runner = FakeRunner(failing="make-second")
    with pytest.raises(StepFailedError) as error:
        run_steps(steps, tmp_path, runner)
    assert str(error.value) == f"step 2 (second) failed with exit status 3; its log: {tmp_path}/logs/second.log"
    assert runner.ran == ALL[:2]
    assert rerun(steps, tmp_path) == ALL[1:]


def test_a_step_that_makes_nothing_has_failed(steps: list[Step], tmp_path: Path) -> None:
    with pytest.raises(StepFailedError, match=r"step 1 \(first\) did not make .*/a; its log: .*first\.log"):
        run_steps(steps, tmp_path, FakeRunner(idle="make-first"))


def test_files_of_others_are_never_removed(steps: list[Step], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(StepFailedError, match="not from the quickstart: move it away, or give another --folder"):
        rerun(steps, tmp_path)
    assert (tmp_path / "a").read_text() == "mine"


# ------------------------------------------------------------------------------------------ the real steps


def test_the_default_commands_take_the_configuration_file_as_it_is() -> None:
    steps = Quickstart(DEFAULT_FOLDER, nproc=2).list_steps()
    assert [step.command for step in steps] == [
        ("data", "stdlib-corpus", "runs/quickstart/corpus.jsonl"),
        (
            *("data", "build", "runs/quickstart/corpus.jsonl", "--output", "runs/quickstart/data"),
            *("--train-tokenizer", "4096", "--validation-fraction", "0.02", "--workers", "2"),
        ),
        ("pretrain", "configs/pretrain/tiny-quickstart.yaml", "--nproc", "2"),
        ("metrics", "plot", "runs/quickstart/metrics", "quickstart", "runs/quickstart/train/experts.png"),
        ("generate", "runs/quickstart/train", "--prompt", "def "),
    ]


def test_another_folder_and_number_of_steps_become_overrides(tmp_path: Path) -> None:
    pretrain = Quickstart(tmp_path, nproc=1, steps=45).list_steps()[2].command
    assert pretrain[2:] == (
        f"train.output={tmp_path}/train",
        f"data.train.0.path={tmp_path}/data",
        "train.steps=45",
        "optimizer.schedule.warmup_steps=3",
        "--nproc",
        "1",
    )


def test_a_folder_of_any_name_is_the_one_that_the_run_gets(tmp_path: Path) -> None:
    folder = tmp_path / "a b,{c}=[1]: #x"
    overrides = Quickstart(folder, nproc=1).list_steps()[2].command[2:4]
    config = load(REPOSITORY / CONFIG, overrides).config
    assert (config.train.output, config.data.train[0].path) == (folder / "train", folder / "data")


@pytest.mark.parametrize("name", ["FILE", "bell\a", "byte\udcff"])
def test_unusable_folders_are_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "FILE").write_text("x")
    with pytest.raises(SystemExit):
        parse_arguments(["--folder", str(tmp_path / name)])
    assert "is not a folder" in (message := capsys.readouterr().err) or "cannot be shown" in message


def test_a_folder_that_cannot_be_made_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").write_text("x")
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--folder", str(tmp_path / "FILE" / "x")])
    monkeypatch.chdir(tmp_path)  # main changes the folder; this one is restored
    assert main() == 1
    assert f"Not a directory: '{tmp_path}/FILE/x" in capsys.readouterr().err


def test_commands_are_shown_as_a_shell_takes_them() -> None:
    assert shown(("generate", "run", "--prompt", "def ")).endswith("steptron generate run --prompt 'def '")


def test_the_summary_names_the_plot_the_losses_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickstart = Quickstart(tmp_path, nproc=2)
    quickstart.run.mkdir()
    records = [ValidationRecord(step=step, lm_loss=loss, mtp_losses=()) for step, loss in ((50, 5.0), (100, 3.21))]
    (quickstart.run / "log.jsonl").write_text("".join(to_json(record) + "\n" for record in records))

    class Manifest:
        class validation:
            unigram_entropy = 6.54

    monkeypatch.setattr("tools.quickstart.read_manifest", lambda folder: {quickstart.data: Manifest}[folder])
    lines = dict(quickstart.summarize())
    assert lines["loss plot"] == f"{tmp_path}/train/loss.png"
    assert lines["validation loss"].startswith("3.21 nats per token")
    assert "6.54" in lines["validation loss"]
    assert lines["to go on"].endswith("train.steps=200 --nproc 2")


def test_options() -> None:
    options = parse_arguments([])
    assert (options.folder, options.nproc, options.steps) == (DEFAULT_FOLDER, 2, None)
    options = parse_arguments(["--folder", f"{REPOSITORY}/runs/other", "--nproc", "1", "--steps", "20"])
    assert (options.folder, options.nproc, options.steps) == (Path("runs/other"), 1, 20)


@pytest.mark.parametrize("option", ["--nproc=0", "--steps=-1", "--steps=many"])
def test_numbers_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([option])
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_duration() -> None:
    assert [duration(seconds) for seconds in (8.4, 59.6, 200.0)] == ["8 s", "1 min 0 s", "3 min 20 s"]


# ------------------------------------------------------------------------------------------ running commands


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_output_goes_to_the_log_and_on_and_the_status_is_returned(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = tmp_path / "logs" / "x.log"
    program = python("import os, sys; os.write(1, b'out\\n'); os.write(2, 'über\\n'.encode()); sys.exit(7)")
    assert run_process(program, log) == 7
    assert log.read_bytes() == "out\nüber\n".encode()
    assert capfdbinary.readouterr().out == log.read_bytes()


def test_a_program_that_is_silent_for_too_long_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    start = time.monotonic()
    with pytest.raises(StepFailedError, match=r"printed nothing for \d+ s and was killed; its log: .*x\.log"):
        run_process(python("import time; time.sleep(60)"), log, silence_limit_seconds=0.2)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_program_once_and_its_clean_end_is_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    trainer = (
        "import signal, time\n"
        "got = []\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda n, f: got.append(n))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "print('saved after', [signal.Signals(n).name for n in got], flush=True)\n"
    )
    driver = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tools.quickstart import InterruptedStepError, run_process\n"
        "try:\n"
        f"    run_process((sys.executable, '-c', {trainer!r}), Path({str(tmp_path / 'x.log')!r}))\n"
        "except InterruptedStepError:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen(python(driver), stdout=subprocess.PIPE, cwd=REPOSITORY, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert output == f"saved after ['{number.name}']\ninterrupted\n"
