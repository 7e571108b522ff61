"""What stands in for telemetry where a run has no metrics server."""

from __future__ import annotations

from types import TracebackType

from steptron.train.step import Observation


class NoTelemetry:
    """Measures nothing and sends nothing."""

    def begin(self, step: int) -> None:
        """Before a step, 1 for the first."""

    def end(
        self, observed: Observation, gradient_norm: float | None, consumed_tokens: int, rates: dict[str, float]
    ) -> None:
        """After the step; without a gradient norm where no update was made."""

    def note(self, metric: str, value: float) -> None:
        """A figure that belongs to the latest step."""

    def event(self, kind: str, detail: str) -> None:
        """Something that happened at the latest step."""

    def send(self) -> None:
        """Nothing more is known of the latest step."""

    def checkpoint_requested(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        return False

    def __enter__(self) -> NoTelemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""
