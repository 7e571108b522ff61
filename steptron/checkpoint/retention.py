"""Which checkpoints of a run are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
        requested: an alert asked for it.
        ends_stage: the last of a stage of the run.
    """

    step: int
    validation_loss: float | None = None
    requested: bool = False
    ends_stage: bool = False


def superfluous(checkpoints: Iterable[Kept], rule: CheckpointConfig) -> list[int]:
    """Steps of the checkpoints that a rule does not keep, ascending.

    Kept are the newest ``keep``, those at multiples of ``keep_every_steps``, and the ``keep_best`` of lowest
    validation loss, the later one of equals; besides, the newest ``keep_requested`` that alerts have asked for, and of
    each the one before it: what an alert has seen may have begun earlier. The last one of each stage is kept for good.
    """
    steps = sorted(checkpoints, key=lambda kept: kept.step)
    regular = [kept for kept in steps if not kept.requested]
    newest = {kept.step for kept in (regular or steps)[-rule.keep :]}
    for asked in [kept for kept in steps if kept.requested][-rule.keep_requested :] if rule.keep_requested else ():
        newest |= {asked.step, max((kept.step for kept in regular if kept.step < asked.step), default=asked.step)}
    newest |= {kept.step for kept in steps[-1:]}  # a run goes on from the newest, whoever asked for it
    validated = [kept for kept in steps if kept.validation_loss is not None]
    best = sorted(validated, key=lambda kept: (kept.validation_loss, -kept.step))[: rule.keep_best]
    stays = newest | {kept.step for kept in best} | {kept.step for kept in steps if kept.ends_stage}
    every = rule.keep_every_steps
    return [kept.step for kept in steps if kept.step not in stays and not (every and kept.step % every == 0)]


def doomed(output: Path, rule: CheckpointConfig, damaged: Collection[Path] = ()) -> list[Path]:
    """Those of a run's checkpoints that a rule does not keep, oldest first.

    Damaged ones, and those whose manifest cannot be read, never count as kept. They go when one that stays is newer.

    Args:
        output: the run's folder.
        rule: how many stay.
        damaged: checkpoints that are known not to be whole.
    """
    folders = list_checkpoints(output)
    sound = {folder: kept for folder in folders if folder not in damaged and (kept := _read(folder)) is not None}
    leaving = set(superfluous(sound.values(), rule))
    stays = [folder for folder in sound if step_of(folder) not in leaving]
    last = max(map(step_of, stays), default=0)
    held = {folder.resolve() for folder in stays}  # what a link that stays points to stays
    return [f for f in folders if f not in stays and step_of(f) < last and (f.is_symlink() or f.resolve() not in held)]


def prune(output: Path, rule: CheckpointConfig, damaged: Collection[Path] = ()) -> None:
    """Deletes what a rule does not keep; see :func:`doomed`.

    Raises:
        OSError: a folder cannot be deleted.
    """
    for folder in doomed(output, rule, damaged):
        delete(folder)


def _read(folder: Path) -> Kept | None:
    try:
        manifest = read_manifest(folder)
        return Kept(
            step_of(folder),
            manifest.validation_loss,
            manifest.requested,
            manifest.stage is not None and manifest.stage.ends,
        )
    except UserError:
        return None
