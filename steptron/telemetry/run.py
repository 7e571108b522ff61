"""What a run's processes send to the metrics server: a frame of each rank for every step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import torch.distributed as dist

from steptron import __version__
from steptron.config.schema import PretrainConfig
from steptron.platform.distributed import gather_to_all
from steptron.telemetry.frame import transfer
from steptron.telemetry.off import NoTelemetry
from steptron.telemetry.probes import Probes
from steptron.telemetry.quantities import resolve
from steptron.telemetry.stopwatch import Stopwatch
from steptron.train.messages import warn
from steptron.train.step import Observation, TrainStep
from steptron_metrics.client import ClientStatus, Layout, MetricsClient
from steptron_metrics.protocol.description import Series
from steptron_metrics.results import Event

TOKEN_VARIABLE = "STEPTRON_METRICS_TOKEN"
"""Environment variable with the token that the server asks for."""
SPOOL = "telemetry"
"""Folder in a run's output folder for what the server has not yet taken."""


@dataclass
class _Frame:
    """A step's, whose values may still be on their way from the device."""

    step: int
    series: tuple[Series, ...]
    values: Callable[[], np.ndarray]
    compute_seconds: Callable[[], float]
    own: list[tuple[Series, float]]
    ended_ns: int
    seconds: float
    consumed_tokens: int
    events: list[Event] = field(default_factory=list)


class Telemetry(NoTelemetry):
    """Measures steps and sends what it has measured; a context manager that sends the rest.

    What is known only after a step (a validation's loss, events) goes along in its frame until :meth:`send`. Nothing
    here waits for the network.

    Args:
        config: the whole configuration, with a server.
        step: the model and its optimizer.
        stopwatch: times this rank's attention.
        say: tells the user, once.
    """

    def __init__(
        self, config: PretrainConfig, step: TrainStep, stopwatch: Stopwatch, say: Callable[[str], None]
    ) -> None:
        telemetry = config.telemetry
        assert telemetry.server is not None
        self._stage, self._stopwatch = step.mesh.pipeline_rank, stopwatch
        self._rank, self._is_reporter = dist.get_rank(), dist.get_rank() == 0
        self._quantities = resolve(telemetry.every_steps, telemetry.keep)
        self._probes = Probes(step, config.balance.ep_groups or config.parallel.expert, self._quantities)
        name = run_name(config)
        # Later sessions must have larger numbers: all ranks take the first one's clock.
        started_ns = gather_to_all(time.time_ns())[0]
        self._client = MetricsClient(
            telemetry.server,
            name,
            started_ns,
            dist.get_world_size(),
            spool=config.train.output / SPOOL / f"rank-{self._rank:05}",
            token=os.environ.get(TOKEN_VARIABLE),
            certificate=telemetry.certificate,
            software=f"steptron {__version__}",
            spool_bytes=int(telemetry.spool_gb * 2**30),
            warn=lambda text: warn(f"telemetry of rank {self._rank}: {text}"),
        )
        say(f"telemetry to {telemetry.server} as {name}")
        self._layouts: dict[tuple[Series, ...], Layout] = {}
        self._number = 0
        self._started = time.perf_counter()
        self._latest: _Frame | None = None
        self._waiting: _Frame | None = None
        self._is_late = step.device.type == "cuda"

    def begin(self, step: int) -> None:
        """Before a step, 1 for the first."""
        self._number = step
        self._probes.begin(step)
        self._stopwatch.take()  # what a validation has added since the last step
        self._started = time.perf_counter()

    def end(
        self, observed: Observation, gradient_norm: float | None, consumed_tokens: int, rates: dict[str, float]
    ) -> None:
        """After the step.

        Args:
            observed: what the forward passes showed.
            gradient_norm: None where no update was made.
            consumed_tokens: of the run, this step's included.
            rates: further figures of the step, by metric.
        """
        measured = self._probes.end()
        seconds = time.perf_counter() - self._started
        own: list[tuple[Series, float]] = [
            (Series("rank.stage"), float(self._stage)),
        ]
        if self._is_reporter:
            own += _of_the_run(observed, gradient_norm, seconds, rates)
        self._latest = _Frame(
            self._number,
            tuple(series for part in measured for series in part.series),
            transfer(measured),
            self._stopwatch.take(),
            own,
            time.time_ns(),
            seconds,
            consumed_tokens,
        )

    def note(self, metric: str, value: float) -> None:
        """A figure that belongs to the latest step; one rank reports it."""
        if self._is_reporter and self._latest is not None:
            self._latest.own.append((Series(metric), value))

    def event(self, kind: str, detail: str) -> None:
        """Something that happened at the latest step; likewise."""
        if self._is_reporter and self._latest is not None:
            self._latest.events.append(Event(kind, detail))

    def send(self) -> None:
        """Nothing more is known of the latest step: hands its frame to the client."""
        frame, self._latest = self._latest, None
        if frame is not None and self._is_late:
            # Its values are still on their way: those of the step before have come by now.
            frame, self._waiting = self._waiting, frame
        if frame is not None:
            self._send(frame)

    def _send(self, frame: _Frame) -> None:
        own = list(frame.own)
        if self._quantities["rank.compute_seconds"].every_steps:
            own.append((Series("rank.compute_seconds"), frame.compute_seconds()))
        series = (*frame.series, *(one for one, _ in own))
        layout = self._layouts.get(series)
        if layout is None:
            layout = self._layouts[series] = self._client.describe(series)
        values = np.concatenate([frame.values(), np.array([value for _, value in own], np.float32)])
        self._client.send(
            self._rank,
            frame.step,
            layout,
            values,
            ended_ns=frame.ended_ns,
            seconds=frame.seconds,
            consumed_tokens=frame.consumed_tokens,
            events=frame.events,
        )

    def checkpoint_requested(self) -> bool:
        """Whether an alert has asked for a checkpoint since the last call."""
        return bool(self._client.requests())

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._probes.detach()
        for frame in (self._waiting, self._latest):
            if frame is not None:
                self._send(frame)
        status = self._client.close()
        if problem := _describe_loss(status):
            warn(f"telemetry of rank {self._rank}: {problem}")


def run_name(config: PretrainConfig) -> str:
    """The configured name, or the last two parts of the output folder, such as ``quickstart-train``."""
    return config.telemetry.run or default_run_name(config.train.output)


def default_run_name(output: Path) -> str:
    """A name that the server takes, made from a folder's."""
    joined = "-".join(output.resolve().parts[1:][-2:])
    text = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in joined)
    return text.lstrip("._-")[:128] or "run"


def _of_the_run(
    observed: Observation, gradient_norm: float | None, seconds: float, rates: dict[str, float]
) -> list[tuple[Series, float]]:
    """What rank 0 reports of a step for all.

    On the wire NaN says that nothing was measured: a loss that is NaN goes out as infinity.
    """
    losses, targets = observed.losses, observed.counts.targets
    figures = {
        "train.loss": losses.total,
        "train.tokens_per_second": observed.counts.valid / max(seconds, 1e-9),
        **rates,
    }
    if targets[0]:
        figures["train.lm_loss"] = losses.lm
    if gradient_norm is not None:
        figures["train.grad_norm"] = gradient_norm
    if losses.ep is not None:
        figures["train.ep_loss"] = losses.ep
    own = [(Series(metric), value) for metric, value in figures.items()]
    depths = zip(losses.mtp, targets[1:], strict=True)
    own += [(Series("train.mtp_loss", first=depth), loss) for depth, (loss, count) in enumerate(depths) if count]
    return [(series, math.inf if math.isnan(value) else value) for series, value in own]


def _describe_loss(status: ClientStatus) -> str:
    """What a user should know at the end; empty where everything has arrived."""
    parts = []
    if status.dropped:
        parts.append(f"{status.dropped} frames were dropped, the spool being full")
    if status.superseded:
        parts.append(
            f"{status.superseded} frames of steps that have been made again since were not taken, or another run has "
            "the same name (telemetry.run)"
        )
    if status.refused:
        parts.append(f"{status.refused} frames were refused: {status.last_error}")
    if status.spooled:
        parts.append(
            f"{status.spooled} frames could not be sent ({status.last_error}); they wait in the run's folder and go "
            "out when it runs again"
        )
    return "; ".join(parts)
