"""The checkpoint that a run goes on from: the newest one that is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from steptron.checkpoint.folder import list_checkpoints, partial_folders, put_back
from steptron.checkpoint.verification import Report, problems
from steptron.errors import UserError
from steptron.platform.distributed import gather_to_all, on_first_rank


def newest_valid(output: Path, contents: bool, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint of a run in which every file is as it was written; None where the run has none. Collective:
    the processes read the files between them.

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
        say(f"ignored, not completely written: {', '.join(map(str, partial))}")
    for folder in reversed(folders):
        faults = problems_of_all(folder, contents)
        if not faults:
            return folder
        say("\n  ".join([f"checkpoint {folder} is damaged and passed over:", *faults]))
    if folders:
        raise UserError(
            f"none of the {len(folders)} checkpoints in {output / 'checkpoints'} is whole (see above): put one back "
            "from a copy, give another train.output, or start over with --fresh"
        )
    return None


def problems_of_all(folder: Path, contents: bool, report: Report = lambda done, total: None) -> list[str]:
    """What is wrong with a checkpoint, of whose files each process tests its share. Collective.

    ``report`` is told of the progress of this process's share.
    """
    share = dist.get_rank(), dist.get_world_size()
    return sorted({text for own in gather_to_all(problems(folder, contents, share, report)) for text in own})
