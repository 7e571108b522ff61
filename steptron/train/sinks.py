"""Where the records of a run go: console, JSON lines, TensorBoard, Weights & Biases.

Sinks live in one process, the one that reports for all. Each goes on after a resume without
showing a step twice.
"""

from __future__ import annotations

import io
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from steptron.config.stages import Stage
from steptron.errors import UserError
from steptron.train.appended_file import AppendedFile
from steptron.train.console import ConsoleSink
from steptron.train.messages import warn
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
    """Several sinks as one; a context manager that closes all of them, whatever happens to one.

    Where another exception leaves the ``with`` block, what goes wrong in closing is only a warning.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        if errors := self._close_all():
            raise errors[0]

    def _close_all(self) -> list[Exception]:
        errors = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        return errors

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        for also in self._close_all():
            warn(str(also))


class JsonlSink:
    """One JSON object per line, appended at once, or later where that fails (``AppendedFile``).

    On opening, an existing log is cut back to what the run resumes from: records of later steps and
    a half-written last line are dropped, a complete last line that lacks its newline gets it.

    Args:
        path: the log; its folder is made where missing.
        resume_step: optimizer steps completed at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UserError: a line before the last is not JSON with a step; the message names file and line.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        if path.exists():
            cut_back(path, resume_step)
        self._file = AppendedFile(path)

    def write(self, record: Record) -> None:
        self._file.append(f"{to_json(record)}\n".encode())

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """TensorBoard event files; TensorBoard hides what was written beyond the resumed step.

    TensorBoard's own writer is not used: once its thread has met a full disk it writes nothing more, and leaves half an
    event that hides what follows. These files are an ``AppendedFile`` like the log; as the log has everything, what
    is lost in the end is only a warning.

    Args:
        folder: folder of the event files.
        resume_step: optimizer steps completed at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UserError: tensorboard is not installed; the message says what to do.
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UserError(
                "train.logging.tensorboard needs the package tensorboard: `pip install tensorboard`, "
                "or set train.logging.tensorboard=false"
            ) from error
        self._event, self._summary, self._framing = event_pb2.Event, summary_pb2.Summary, RecordWriter
        self._file = AppendedFile(_event_file(folder))
        # TensorBoard hides events of this step and later ones in earlier files when a session starts.
        self._append(step=resume_step + 1, file_version="brain.Event:2")
        self._append(step=resume_step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, record: Record) -> None:
        if figures := scalars(record):
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
            self._append(step=record.step, summary=self._summary(value=values))

    def close(self) -> None:
        try:
            self._file.close()
        except UserError as error:
            warn(f"for TensorBoard only: {error}")

    def _append(self, **content: Any) -> None:
        framed = io.BytesIO()
        self._framing(framed).write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.append(framed.getvalue())


def _event_file(folder: Path) -> Path:
    """A new file's name: TensorBoard takes what has "tfevents" in its name, in alphabetical order."""
    stem = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
    number = 0
    while (path := folder / f"{stem}.{number}").exists():
        number += 1
    return path


class WandbSink:
    """A Weights & Biases run. Its id is kept in the output folder, so that a resumed run goes on in it.

    Steps are an ordinary logged value and the axis of all others: W&B's own step counter refuses to
    go back, as a resume from an older checkpoint must.

    When W&B fails under the run, there is one message, and it gets nothing more: the log has everything.

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
        # Empty where it could not be written.
        if not id_file.exists() or not id_file.read_text(encoding="utf-8").strip():
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
        self._has_failed = False

    def write(self, record: Record) -> None:
        self._try(lambda: self._run.log({"step": record.step, **scalars(record)}))

    def close(self) -> None:
        self._try(self._run.finish)

    def _try(self, action: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            action()
        except Exception as error:  # its service dies with errors of many types
            self._has_failed = True
            warn(f"Weights & Biases gets nothing more: {type(error).__name__}: {error}; log.jsonl goes on")


def make_sinks(stage: Stage, resume_step: int) -> Sinks:
    """Opens the sinks that ``train.logging`` asks for, in the reporting process.

    Args:
        stage: of the run that is about to train; the run's folder gets ``log.jsonl``, ``tensorboard/`` and W&B's files.
        resume_step: optimizer steps completed at the checkpoint that the run resumes from; 0 for a new run.

    Raises:
        UserError: a sink that was asked for needs a package that is not installed, or the existing
            log cannot be read.
    """
    config, output = stage.config, stage.config.train.output
    logging = config.train.logging
    sinks: list[Sink] = []
    # Those that may miss a package come first: nothing is cut back by a run that does not start.
    if logging.wandb_project is not None:
        sinks.append(WandbSink(logging.wandb_project, output, config.model_dump(mode="json")))
    if logging.tensorboard:
        sinks.append(TensorBoardSink(output / "tensorboard", resume_step))
    sinks.append(JsonlSink(output / LOG_NAME, resume_step))
    sinks.append(
        ConsoleSink(
            total_steps=stage.last_step,
            total_sequences=stage.consumed_before(stage.last_step),
            done_steps=resume_step,
            done_sequences=stage.consumed_before(resume_step),
        )
    )
    return Sinks(sinks)


def cut_back(path: Path, resume_step: int) -> None:
    """Drops lines of later steps from a file of JSON objects that have a ``step``, and a last line that is cut off.

    Raises:
        UserError: a line before the last is not such an object; the message names file and line.
        OSError: the file cannot be written; it is as it was.
    """
    content = path.read_bytes()
    lines = content.split(b"\n")
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
    rest = b"".join(kept)
    if content.startswith(rest):
        os.truncate(path, len(rest))  # needs no space
        return
    replacement = path.with_name(path.name + ".new")
    try:
        replacement.write_bytes(rest)
        os.replace(replacement, path)
    except OSError:
        replacement.unlink(missing_ok=True)
        raise
