"""The checkpoint that a run goes on from: the newest one that is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from steptron.checkpoint.folder import list_checkpoints, partial_folders, put_back
from steptron.checkpoint.verification import Report, problems
from steptron.errors import UserError
from steptron.platform.distributed import gather_to_all, on_first_rank


class Newest(NamedTuple):
    """What a run goes on from.

    Attributes:
        folder: the newest checkpoint that is whole; None where the run has none at all.
        damaged: newer ones, which are not.
    """

    folder: Path | None
    damaged: frozenset[Path]


def newest_valid(output: Path, contents: bool, say: Callable[[str], None]) -> Newest:
    """Finds the newest checkpoint of a run in which every file is as it was written. Collective: the processes read the
    files between them.

    Args:
        output: the run's folder.
        contents: compare checksums; otherwise only sizes.
        say: told of each checkpoint that is passed over, and of which file of it failed.

    Raises:
        UserError: on every rank: there are checkpoints, but none is whole. To begin anew is for the user to decide.
    """

    # One rank decides for all: others may see another state of a shared folder.
    def look() -> tuple[list[Path], list[Path]]:
        put_back(output)
        return list_checkpoints(output), partial_folders(output / "checkpoints")

    folders, partial = on_first_rank(f"the checkpoints of {output} cannot be looked for", look)
    if partial:
        say(f"passed over, not completely written: {', '.join(map(str, partial))}")
    damaged: set[Path] = set()
    for folder in reversed(folders):
        faults = problems_of_all(folder, contents)
        if not faults:
            return Newest(folder, frozenset(damaged))
        damaged.add(folder)
        say("\n  ".join([f"checkpoint {folder} is damaged and passed over:", *faults]))
    if folders:
        raise UserError(
            f"none of the {len(folders)} checkpoints in {output / 'checkpoints'} is whole (see above): put one back "
            "from a copy, give another train.output, or start over with --fresh"
        )
    return Newest(None, frozenset())


def problems_of_all(
    folder: Path,
    contents: bool,
    report: Report = lambda done, total: None,
    group: dist.ProcessGroup | None = None,
) -> list[str]:
    """What is wrong with a checkpoint, of whose files each process tests its share. Collective.

    Args:
        folder: the checkpoint.
        contents: compare checksums; otherwise only sizes.
        report: told of the progress of this process's share.
        group: of all processes, with more patience than the default one.
    """
    share = dist.get_rank(), dist.get_world_size()
    return sorted({text for own in gather_to_all(problems(folder, contents, share, report), group) for text in own})
