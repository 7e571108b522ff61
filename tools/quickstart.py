"""From text to a trained small model on this machine: the steps behind `make quickstart`.

Each step is one `steptron` command, shown before it runs, with its own log. A step whose result is
there already, made by the same command from the same input, is reused; pre-training that was
interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from steptron.config.tree import dump_scalar
from steptron.data.manifest import read_manifest
from steptron.train.records import ValidationRecord, read_records
from steptron.train.stop import STOPPED_EXIT_CODE
from steptron_metrics.errors import MetricsError
from steptron_metrics.server.local import running
from steptron_metrics.settings import Settings

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = Path("runs/quickstart")
CONFIG = Path("configs/pretrain/tiny-quickstart.yaml")
VOCABULARY = 4096
PROMPT = "def "
RUN_NAME = "quickstart"  # at the metrics server
SHORT_RUN_STEPS = 100  # runs below it get a warm-up in proportion: the configuration's 20 steps are for longer ones
SILENCE_LIMIT_SECONDS = 900  # a step that prints nothing for so long is taken for stuck
STOP_LIMIT_SECONDS = 330  # silence allowed to a step that was asked to stop: `steptron pretrain` gives itself 300

Command = tuple[str, ...]  # arguments of `steptron`


class StepFailedError(Exception):
    """A step did not succeed; the message names its log."""


class InterruptedStepError(Exception):
    """A step was asked to stop, by Ctrl-C or SIGTERM, and can be continued."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: names the step's log and record.
        title: heading.
        command: arguments of `steptron`.
        results: files and folders that the step makes.
        resumable: the command goes on from what an earlier run of it has left; the results of other
            commands are removed before a new run.
        shows_result: the step's output is its result: shown again when the step is reused.
        aside: further arguments that the result does not depend on.
    """

    name: str
    title: str
    command: Command
    results: tuple[Path, ...]
    resumable: bool = False
    shows_result: bool = False
    aside: Command = ()


@dataclass(frozen=True)
class Record:
    """What is remembered of a step.

    Attributes:
        command: the command.
        input: ``result`` of the step before; empty for the first.
        result: identifies this run's result.
        done: whether the command has succeeded.
    """

    command: Command
    input: str
    result: str
    done: bool

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record in a file; None where there is none that can be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(tuple(content["command"]), content["input"], content["result"], content["done"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"command": self.command, "input": self.input, "result": self.result, "done": self.done}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run_steps(steps: Sequence[Step], folder: Path, run: Callable[[Command, Path], int]) -> None:
    """Runs the steps in order and reuses what is done.

    A step is done when its record says so for the same command and the same input, and its results
    are there. When the input has changed, or a command that cannot resume was interrupted, the old
    results are removed first.

    Args:
        steps: the steps.
        folder: gets ``steps/<name>.json`` (records) and ``logs/<name>.log``.
        run: runs a command with its output in a log, and returns its exit status.

    Raises:
        StepFailedError: a command failed or did not make what it should have.
    """
    made_from = ""
    for number, step in enumerate(steps, start=1):
        log = folder / "logs" / f"{step.name}.log"
        record_file = folder / "steps" / f"{step.name}.json"
        print(f"\n[{number}/{len(steps)}] {step.title}", flush=True)
        record = Record.read(record_file)
        same_input = record is not None and record.input == made_from
        complete = all(result.exists() for result in step.results)
        if record is not None and record.done and same_input and record.command == step.command and complete:
            print(f"  reused, made earlier by: {shown(step.command)}", flush=True)
            if step.shows_result and log.exists():
                print(log.read_text(encoding="utf-8", errors="replace").rstrip(), flush=True)
        else:
            if not (step.resumable and same_input):
                remove_old(step, ours=record is not None)
            record = Record(step.command, made_from, uuid.uuid4().hex, done=False)
            record.write(record_file)
            command = (*step.command, *step.aside)
            print(f"  $ {shown(command)}", flush=True)
            status = run(command, log)
            if status != 0:
                raise StepFailedError(f"step {number} ({step.name}) failed with exit status {status}; its log: {log}")
            for result in step.results:
                if not result.exists():
                    raise StepFailedError(f"step {number} ({step.name}) did not make {result}; its log: {log}")
            record = Record(step.command, made_from, record.result, done=True)
            record.write(record_file)
        made_from = record.result


def remove_old(step: Step, ours: bool) -> None:
    """Removes what an earlier run of a step has left.

    Raises:
        StepFailedError: something is there that the quickstart has not made.
    """
    for result in step.results:
        if not result.exists():
            continue
        if not ours:
            raise StepFailedError(
                f"{result} is there, but not from the quickstart: move it away, or give another --folder"
            )
        print(f"  removing {result}, made from other input or left incomplete", flush=True)
        if result.is_dir():
            shutil.rmtree(result)
        else:
            result.unlink()


def shown(command: Command) -> str:
    """A command as it can be typed in the repository's folder."""
    program = Path(sys.executable).parent / "steptron"
    if program.is_relative_to(REPOSITORY):
        program = program.relative_to(REPOSITORY)
    return shlex.join((str(program), *command))


# ------------------------------------------------------------------------------------------ the steps


@dataclass(frozen=True)
class Quickstart:
    """Where the quickstart works and how.

    Attributes:
        folder: where everything is written.
        nproc: processes of the pre-training.
        steps: optimizer steps instead of those of the configuration file.
        metrics_server: address that the training sends its measurements to.
    """

    folder: Path
    nproc: int
    steps: int | None = None
    metrics_server: str | None = None

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus.jsonl"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def run(self) -> Path:
        return self.folder / "train"

    @property
    def metrics(self) -> Path:
        """Folder of the metrics server."""
        return self.folder / "metrics"

    @property
    def experts_plot(self) -> Path:
        return self.run / "experts.png"

    def pretrain(self, steps: int | None) -> Command:
        """The command of the pre-training; overrides only where it departs from the configuration file."""
        overrides = []
        if self.folder != DEFAULT_FOLDER:
            overrides += [
                f"{key}={dump_scalar(str(path))}"
                for key, path in (("train.output", self.run), ("data.train.0.path", self.data))
            ]
        if steps is not None:
            overrides.append(f"train.steps={steps}")
        if steps is not None and steps < SHORT_RUN_STEPS:
            overrides.append(f"optimizer.schedule.warmup_steps={steps // 15}")
        return ("pretrain", str(CONFIG), *overrides, "--nproc", str(self.nproc))

    def list_steps(self) -> list[Step]:
        corpus, data = str(self.corpus), str(self.data)
        return [
            Step(
                "corpus",
                "Corpus: the sources of Python's standard library",
                ("data", "stdlib-corpus", corpus),
                (self.corpus,),
            ),
            Step(
                "data",
                "Tokenizer and indexed dataset",
                (
                    *("data", "build", corpus, "--output", data, "--train-tokenizer", str(VOCABULARY)),
                    *("--validation-fraction", "0.02", "--workers", "2"),
                ),
                (self.data,),
            ),
            Step(
                "train",
                "Pre-training of the `tiny` mixture-of-experts model",
                self.pretrain(self.steps),
                (self.run,),
                resumable=True,
                aside=()
                if self.metrics_server is None
                else (f"telemetry.server={self.metrics_server}", f"telemetry.run={RUN_NAME}"),
            ),
            Step(
                "experts",
                "Picture of the experts' activation norms",
                ("metrics", "plot", str(self.metrics), RUN_NAME, str(self.experts_plot)),
                (self.experts_plot,),
            ),
            Step(
                "generate",
                "Text from the trained model (it will be rough: a very small model after minutes of training)",
                ("generate", str(self.run), "--prompt", PROMPT),
                (),
                shows_result=True,
            ),
        ]

    def summarize(self) -> list[tuple[str, str]]:
        """What has come of it, as pairs of label and text."""
        records = read_records(self.run / "log.jsonl")
        last_step = max(record.step for record in records)
        lines = [
            ("checkpoints", str(self.run / "checkpoints")),
            ("loss plot", str(self.run / "loss.png")),
            ("experts' norms", str(self.experts_plot)),
            ("metrics page", f"{shown(('metrics', 'serve', '--folder', str(self.metrics)))} shows what was measured"),
        ]
        validations = [record for record in records if isinstance(record, ValidationRecord)]
        if validations:
            entropy = read_manifest(self.data).validation.unigram_entropy
            lines.append(
                (
                    "validation loss",
                    f"{validations[-1].lm_loss:.2f} nats per token (a model that ignores the context "
                    f"reaches {entropy:.2f}, the unigram entropy)",
                )
            )
        lines.append(("to go on", shown(self.pretrain(2 * last_step))))
        return lines


# ------------------------------------------------------------------------------------------ running commands


def run_command(command: Command, log: Path) -> int:
    """Runs `steptron`; as ``run_process``."""
    status = run_process((sys.executable, "-m", "steptron", *command), log)
    if status == STOPPED_EXIT_CODE:
        raise InterruptedStepError
    return status


def run_process(program: Sequence[str], log: Path, silence_limit_seconds: float = SILENCE_LIMIT_SECONDS) -> int:
    """Runs a program with its output on standard output and in ``log``; on a terminal it sees a terminal.

    Ctrl-C and SIGTERM are handed to the program, which may write a checkpoint before it ends.

    Returns:
        The exit status.

    Raises:
        InterruptedStepError: a signal asked to stop.
        StepFailedError: the program printed nothing for too long and was killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = _terminal() if sys.stdout.isatty() else os.pipe()
    with log.open("wb") as log_file, os.fdopen(reader, "rb", buffering=0) as output:
        # A process group of its own: a Ctrl-C reaches the program once, from here, together with its workers.
        process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, process_group=0)
        os.close(writer)
        with _hand_on_signals(process) as received:
            heard = time.monotonic()
            while True:
                ended = process.poll() is not None
                if select.select([output], [], [], 0.0 if ended else 0.5)[0]:
                    chunk = _read(output.fileno())
                    if not chunk:
                        break
                    heard = time.monotonic()
                    log_file.write(chunk)
                    log_file.flush()
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
                elif ended:
                    break
                elif time.monotonic() - heard > (STOP_LIMIT_SECONDS if received else silence_limit_seconds):
                    os.killpg(process.pid, signal.SIGKILL)
                    raise StepFailedError(
                        f"`{shlex.join(program)}` printed nothing for {time.monotonic() - heard:.0f} s "
                        f"and was killed; its log: {log}"
                    )
            status = process.wait(STOP_LIMIT_SECONDS)
    if received:
        raise InterruptedStepError
    return status


def _read(descriptor: int) -> bytes:
    """Some bytes; none at the end (which a pseudo-terminal reports as an error)."""
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def _terminal() -> tuple[int, int]:
    """A pseudo-terminal of the size of ours: (the end to read, the program's end)."""
    reader, writer = os.openpty()
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST  # line ends as they are written: the real terminal, and the log, get plain ones
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    size = os.get_terminal_size(sys.stdout.fileno())
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    return reader, writer


@contextlib.contextmanager
def _hand_on_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """While open, SIGINT goes to the program's process group, as from a terminal, and SIGTERM to the program."""
    received: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------ metrics


def metrics_settings(folder: Path) -> Settings:
    """A server at the usual ports, or at free ones where those are taken."""
    usual = Settings(folder)
    for port in (usual.port, usual.http_port):
        with socket.socket() as probe:
            try:
                probe.bind((usual.host, port))
            except OSError:
                return replace(usual, port=0, http_port=0)
    return usual


# ------------------------------------------------------------------------------------------ the command


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pre-train a small mixture of experts from text, on this machine.")
    parser.add_argument(
        "--folder", type=from_repository, default=DEFAULT_FOLDER, help="where everything is written (%(default)s)"
    )
    parser.add_argument("--nproc", type=positive, default=2, help="processes of the pre-training (%(default)s)")
    parser.add_argument("--steps", type=positive, help="optimizer steps (as in the configuration file)")
    return parser.parse_args(arguments)


def from_repository(text: str) -> Path:
    """A path as the commands take it, which run in the repository's folder."""
    path = Path(text).resolve()
    if os.path.exists(path) and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    if not text.isprintable():  # configuration files and records are UTF-8 text
        raise argparse.ArgumentTypeError(f"{text!r} holds characters that cannot be shown")
    return path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path


def positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main() -> int:
    options = parse_arguments()
    os.chdir(REPOSITORY)
    start = time.monotonic()
    quickstart = Quickstart(options.folder, options.nproc, options.steps)
    try:
        quickstart.metrics.mkdir(parents=True, exist_ok=True)
        with running(metrics_settings(quickstart.metrics), niceness=10) as server:
            print(f"metrics server: {server.http_address}/ shows the training while it runs", flush=True)
            quickstart = replace(quickstart, metrics_server=server.address)
            run_steps(quickstart.list_steps(), quickstart.folder, run_command)
    except (StepFailedError, MetricsError, OSError) as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    except (InterruptedStepError, KeyboardInterrupt):
        print("\nquickstart: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"\nDone in {duration(time.monotonic() - start)}.")
    for label, text in quickstart.summarize():
        print(f"  {label + ':':<17} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
