"""Which checkpoints of a run are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from steptron.checkpoint.folder import delete, list_checkpoints, step_of
from steptron.checkpoint.manifest import read_manifest
from steptron.config.schema import CheckpointConfig
from steptron.errors import UserError


@dataclass(frozen=True)
class Kept:
    """A checkpoint, as far as retention looks at it.

    Attributes:
        step: optimizer steps.
        validation_loss: nats; None where it was not validated.
    """

    step: int
    validation_loss: float | None = None


def superfluous(checkpoints: Iterable[Kept], rule: CheckpointConfig) -> list[int]:
    """Steps of the checkpoints that a rule does not keep, ascending.

    Kept are the newest ``keep``, those at multiples of ``keep_every_steps``, and the ``keep_best`` of lowest
    validation loss, the later one of equals.
    """
    steps = sorted(checkpoints, key=lambda kept: kept.step)
    newest = {kept.step for kept in steps[-rule.keep :]}
    validated = [kept for kept in steps if kept.validation_loss is not None]
    best = sorted(validated, key=lambda kept: (kept.validation_loss, -kept.step))[: rule.keep_best]
    stays = newest | {kept.step for kept in best}
    every = rule.keep_every_steps
    return [kept.step for kept in steps if kept.step not in stays and not (every and kept.step % every == 0)]


def prune(output: Path, rule: CheckpointConfig, dry_run: bool = False) -> list[Path]:
    """Deletes what a rule does not keep of a run's checkpoints; those deleted (or, in a dry run, that would be).

    A checkpoint whose manifest cannot be read counts as one without a validation loss.

    Raises:
        OSError: a folder cannot be deleted.
    """
    folders = {step_of(folder): folder for folder in list_checkpoints(output)}
    doomed = [folders[step] for step in superfluous((_read(folder) for folder in folders.values()), rule)]
    if not dry_run:
        for folder in doomed:
            delete(folder)
    return doomed


def _read(folder: Path) -> Kept:
    try:
        return Kept(step_of(folder), read_manifest(folder).validation_loss)
    except UserError:
        return Kept(step_of(folder))
