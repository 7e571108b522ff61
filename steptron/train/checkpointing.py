"""When a run writes its checkpoints, and what it does when one cannot be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from steptron.checkpoint.manifest import Progress
from steptron.checkpoint.retention import prune
from steptron.checkpoint.saving import Saver
from steptron.config.stages import Stage
from steptron.errors import UserError
from steptron.platform.distributed import on_first_rank
from steptron.train.step import TrainStep


class Checkpointing:
    """Writes a run's checkpoints. All methods are collective.

    Args:
        stage: of the run, with its configuration.
        datasets: content hashes of the training datasets.
        step: holds what is saved.
        say: prints a message, once for all processes.
        damaged: checkpoints that the run has passed over; they do not count among those that are kept.
    """

    def __init__(
        self,
        stage: Stage,
        datasets: Sequence[str],
        step: TrainStep,
        say: Callable[[str], None],
        damaged: Iterable[Path] = (),
    ) -> None:
        self._config = stage.config
        self._rule = stage.config.train.checkpoint
        self._step = step
        self._say = say
        self._saver = Saver(stage.config, datasets, step.mesh, stage if stage.name else None)
        self._failed_in_a_row = 0
        self._damaged = set(damaged)

    @property
    def is_written(self) -> bool:
        """This process has written its part of the checkpoint that is being written."""
        return self._saver.is_written

    def save(
        self, progress: Progress, validation_loss: float | None, clips: bool, last: bool, requested: bool = False
    ) -> None:
        """Writes a checkpoint, after the one before it is complete.

        Args:
            progress: how far the run has come.
            validation_loss: of this step, nats, where it is known.
            clips: experts' weights are clipped first, where that is on; False where only a signal asks for a
                checkpoint, at which the run would not clip.
            last: the process ends after it: it is waited for, and a failure is an error.
            requested: an alert asked for it; it was not due.

        Raises:
            UserError: parameters are not finite (nothing is written), or too many checkpoints could not be written.
        """
        self.conclude()
        if not self._step.parameters_are_finite():
            raise UserError(
                f"after step {progress.step} these parameters are no longer finite: "
                f"{self._step.describe_non_finite_parameters()}. No checkpoint was written, the last one is as it was. "
                "Lower optimizer.lr (or the lr_multiplier of their roles) or clip gradients (optimizer.clip_grad_norm)"
            )
        # Before the checkpoint is written, so that a run that resumes from it goes on as this one does.
        clipping = self._step.weight_clipping
        if clips and clipping is not None and (clipped := clipping.apply()):
            self._say(f"step {progress.step}: {clipping.describe(clipped)}")
        try:
            self._saver.start(progress, self._step.chunks, self._step.optimizer, validation_loss, requested)
        except UserError as error:
            self._failed(error, last)
            return
        if last or not self._rule.asynchronous:
            self.conclude(last)

    def pass_over(self, damaged: Iterable[Path]) -> None:
        """Has found checkpoints damaged: they no longer count among those that are kept."""
        self._damaged.update(damaged)

    def conclude(self, last: bool = False) -> None:
        """Waits for the checkpoint that is being written, if any, and deletes those that are no longer kept.

        Raises:
            UserError: too many checkpoints could not be written, or this one, which is the last.
        """
        if not self._saver.is_pending:
            return
        try:
            self._damaged.discard(self._saver.finish())
        except UserError as error:
            self._failed(error, last)
            return
        self._failed_in_a_row = 0
        output = self._config.train.output
        try:
            on_first_rank("an old checkpoint cannot be deleted", lambda: prune(output, self._rule, self._damaged))
        except UserError as error:
            self._say(str(error))

    def _failed(self, error: UserError, last: bool) -> None:
        self._failed_in_a_row += 1
        left = self._rule.tolerated_failures - self._failed_in_a_row
        if last or left < 0:
            raise error
        self._say(
            f"{error}\n  training goes on without it; "
            + (
                f"after {left + 1} more such failures in a row the run stops"
                if left
                else "the next such failure stops the run"
            )
        )
