"""What a run does about batches that it should not learn from, and when it gives up."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from steptron.config.schema import FaultsConfig, LossSpikeConfig, RejectedStepPolicy
from steptron.errors import UserError
from steptron.train.step import NonFiniteError, RejectedStep


class RollBack(Exception):
    """The run goes back to its last checkpoint and leaves out the data from there up to a place.

    Attributes:
        reason: why, for the log.
        step: the step that failed (from 1).
        stop: place in the order of training after the last sequence of that step.
    """

    def __init__(self, reason: str, step: int, stop: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.step = step
        self.stop = stop


class LossSpikes:
    """Tells losses that lie too far above those before them.

    Every process sees the same losses and decides alike.

    Args:
        config: how far is too far.
        recent: losses of the last accepted steps, oldest first.
    """

    def __init__(self, config: LossSpikeConfig, recent: Sequence[float] = ()) -> None:
        self._threshold = config.threshold
        self._recent: deque[float] = deque(recent, maxlen=config.window)

    @property
    def recent(self) -> tuple[float, ...]:
        """Losses of the last accepted steps, oldest first; none where spikes are not looked for."""
        return tuple(self._recent) if self._threshold is not None else ()

    def judge(self, loss: float) -> str | None:
        """Why a step with this loss (main head, nats) is a spike; None where it is none, or too few steps are known."""
        if self._threshold is None or len(self._recent) < (self._recent.maxlen or 0):
            return None
        usual = statistics.median(self._recent)
        if not loss - usual > self._threshold:  # nor NaN, the loss of a batch without a target
            return None
        return (
            f"loss {loss:.4f} is {loss - usual:.4f} nats above {usual:.4f}, the median of the last {len(self._recent)} "
            f"steps (train.faults.loss_spike.threshold: {self._threshold:g})"
        )

    def accept(self, loss: float) -> None:
        """Takes the loss of a step that was made; NaN, of a batch without a target, says nothing."""
        if not math.isnan(loss):
            self._recent.append(loss)


class FaultPolicy:
    """Decides about rejected steps, and gives up after too many in a row.

    Args:
        config: the policies.
    """

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._in_a_row = 0
        self._furthest = 0

    def accepted(self, step: int) -> None:
        """A step was made; after one beyond all that failed, faults are counted anew."""
        if step > self._furthest:
            self._in_a_row = 0

    def decide(self, rejected: RejectedStep, step: int) -> RejectedStepPolicy:
        """What to do about a step (from 1) that was not made.

        Raises:
            UserError: the policy is to stop, or there have been too many faults in a row.
        """
        policy: RejectedStepPolicy = self._config.loss_spike.policy
        if isinstance(rejected, NonFiniteError):
            policy = self._config.on_non_finite
        self._furthest = max(self._furthest, step)
        self._in_a_row += 1
        if policy == "stop":
            raise UserError(f"training stopped at step {step}: {rejected}")
        if self._in_a_row > self._config.max_in_a_row:
            raise UserError(
                f"training stopped at step {step}, after {self._config.max_in_a_row} such faults without a good step "
                f"beyond them (train.faults.max_in_a_row): {rejected}"
            )
        return policy
