"""Where the records of a run go: console, JSON lines, TensorBoard, Weights & Biases.

Sinks live in one process, the one that reports for all. Each goes on after a resume without
showing a step twice.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from steptron.config.schema import PretrainConfig
from steptron.errors import UserError
from steptron.train.batch_schedule import BatchSchedule
from steptron.train.console import ConsoleSink
from steptron.train.records import Record, scalars, to_json

LOG_NAME = "log.jsonl"
"""Name of the JSON-lines log in a run's output folder."""


class Sink(Protocol):
    """A receiver of records."""

    def write(self, record: Record) -> None:
        """Takes one record; steps never fall between calls."""

    def close(self) -> None:
        """Writes what is still held back and releases files; a second call does nothing."""


class Sinks:
    """Several sinks as one; a context manager that closes all of them, whatever happens to one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        errors = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JsonlSink:
    """One JSON object per line, appended and flushed at once.

    On opening, an existing log is cut back to what the run resumes from: records of later steps and
    a half-written last line are dropped, a complete last line that lacks its newline gets it.

    Args:
        path: the log; its folder is made where missing.
        resume_step: optimizer steps completed at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UserError: a line before the last is not JSON with a step; the message names file and line.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            cut_back(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard event files; TensorBoard hides what was written beyond the resumed step.

    Args:
        folder: folder of the event files.
        resume_step: optimizer steps completed at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UserError: tensorboard is not installed; the message says what to do.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "train.logging.tensorboard needs the package tensorboard: `pip install tensorboard`, "
                "or set train.logging.tensorboard=false"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run. Its id is kept in the output folder, so that a resumed run goes on in it.

    Steps are an ordinary logged value and the axis of all others: W&B's own step counter refuses to
    go back, as a resume from an older checkpoint must.

    Args:
        project: W&B project.
        output: folder of the run.
        config: shown with the run.

    Raises:
        UserError: wandb is not installed; the message says what to do.
    """

    def __init__(self, project: str, output: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "train.logging.wandb_project needs the package wandb: `pip install wandb`, "
                "or leave train.logging.wandb_project unset"
            ) from error
        output.mkdir(parents=True, exist_ok=True)
        id_file = output / "wandb_run_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
        self._run = wandb.init(
            project=project,
            dir=str(output),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            config=config,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        self._run.log({"step": record.step, **scalars(record)})

    def close(self) -> None:
        self._run.finish()


def make_sinks(config: PretrainConfig, output: Path, resume_step: int) -> Sinks:
    """Opens the sinks that ``train.logging`` asks for, in the reporting process.

    Args:
        config: the run's configuration.
        output: folder of the run; gets ``log.jsonl``, ``tensorboard/`` and W&B's files.
        resume_step: optimizer steps completed at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UserError: a sink that was asked for needs a package that is not installed, or the existing
            log cannot be read.
    """
    logging = config.train.logging
    batches = BatchSchedule(config.train)
    sinks: list[Sink] = []
    # Those that may miss a package come first: nothing is cut back by a run that does not start.
    if logging.wandb_project is not None:
        sinks.append(WandbSink(logging.wandb_project, output, config.model_dump(mode="json")))
    if logging.tensorboard:
        sinks.append(TensorBoardSink(output / "tensorboard", resume_step))
    sinks.append(JsonlSink(output / LOG_NAME, resume_step))
    sinks.append(
        ConsoleSink(
            total_steps=config.train.steps,
            total_sequences=batches.consumed_after(config.train.steps),
            done_steps=resume_step,
            done_sequences=batches.consumed_after(resume_step),
        )
    )
    return Sinks(sinks)


def cut_back(path: Path, resume_step: int) -> None:
    """Drops lines of later steps from a file of JSON objects that have a ``step``, and a last line that is cut off.

    Raises:
        UserError: a line before the last is not such an object; the message names file and line.
    """
    lines = path.read_bytes().split(b"\n")
    kept = []
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:
            continue
        try:
            step = json.loads(line)["step"]
            if not isinstance(step, int):
                raise TypeError(f"step is {step!r}")
        except (ValueError, KeyError, TypeError) as error:
            if last:
                continue
            raise UserError(f"{path}:{number}: not a record of a run; move the file away to start a new log") from error
        if step <= resume_step:
            kept.append(line + b"\n")
    replacement = path.with_name(path.name + ".new")
    replacement.write_bytes(b"".join(kept))
    os.replace(replacement, path)
