"""Progress on the console: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from steptron.train.messages import say
from steptron.train.records import EventRecord, Record, StepRecord, ValidationRecord


class ConsoleSink:
    """Shows step, losses, tokens per second and time left.

    On a terminal a bar that is always up to date; elsewhere (a file, a cluster's log) one line for
    the first record, then at most one per ``line_seconds``, and one for the last record. Validations
    and events are always a line of their own. The time left is that of the remaining sequences at the mean
    speed since the start, validations and checkpoints included, so a batch-size ramp does not
    mislead it.

    Args:
        total_steps: optimizer steps of the whole run.
        total_sequences: sequences of the whole run.
        done_steps: optimizer steps completed before this process started (resume).
        done_sequences: sequences consumed before this process started.
        console: where to write; standard output by default.
        line_seconds: least time between plain lines, seconds.
        clock: source of time, seconds.
    """

    def __init__(
        self,
        total_steps: int,
        total_sequences: int,
        done_steps: int = 0,
        done_sequences: int = 0,
        console: Console | None = None,
        line_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._total_sequences = total_sequences
        self._done_sequences = done_sequences
        self._console = console or Console()
        self._line_seconds = line_seconds
        self._clock = clock
        self._start = clock()
        self._last_line: float | None = None
        self._unshown: StepRecord | None = None
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._progress.add_task(
                f"step {done_steps}/{total_steps}", total=total_steps, completed=done_steps
            )
            self._progress.start()

    def write(self, record: Record) -> None:
        if isinstance(record, ValidationRecord):
            self._line(_validation_text(record))
        elif isinstance(record, EventRecord):
            self._line(f"step {record.step}: {record.event}: {record.detail}")
        elif self._progress is not None:
            self._progress.update(self._task, completed=record.step, description=self._bar_text(record), refresh=True)
        else:
            now = self._clock()
            last = record.step >= self._total_steps
            if self._last_line is None or last or now - self._last_line >= self._line_seconds:
                self._line(self._step_text(record))
                self._last_line, self._unshown = now, None
            else:
                self._unshown = record

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._unshown is not None:
            self._line(self._step_text(self._unshown))
            self._unshown = None

    def _line(self, text: str) -> None:
        if self._progress is None:
            # Not through rich, which would show again and again what a full disk did not take.
            say(text, self._console.file)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _bar_text(self, record: StepRecord) -> str:
        """What fits beside a bar in 80 columns."""
        return "  ".join(
            [
                f"step {record.step}/{self._total_steps}",
                f"loss {record.loss:.4f}",
                f"{record.tokens_per_second:,.0f} tokens/s",
                f"{_duration(self._seconds_left(record))} left",
            ]
        )

    def _step_text(self, record: StepRecord) -> str:
        parts = [f"step {record.step}/{self._total_steps}", f"loss {record.loss:.4f}", f"lm {record.lm_loss:.4f}"]
        if record.mtp_losses:
            parts.append("mtp " + " ".join(f"{loss:.4f}" for loss in record.mtp_losses))
        parts += [
            f"grad {record.grad_norm:.3g}",
            f"lr {record.learning_rate:.2e}",
            f"{record.tokens_per_second:,.0f} tokens/s",
        ]
        if record.mfu is not None:
            parts.append(f"MFU {100 * record.mfu:.1f} %")
        parts.append(f"{_duration(self._seconds_left(record))} left")
        return "  ".join(parts)

    def _seconds_left(self, record: StepRecord) -> float:
        done = record.consumed_sequences - self._done_sequences
        remaining = max(self._total_sequences - record.consumed_sequences, 0)
        return remaining * (self._clock() - self._start) / max(done, 1)


def _validation_text(record: ValidationRecord) -> str:
    parts = [f"validation at step {record.step}", f"lm {record.lm_loss:.4f}"]
    if record.mtp_losses:
        parts.append("mtp " + " ".join(f"{loss:.4f}" for loss in record.mtp_losses))
    if record.bits_per_byte is not None:
        parts.append(f"{record.bits_per_byte:.3f} bits per byte")
    parts += [f"{name} {loss:.4f}" for name, loss in record.domains.items()]
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
