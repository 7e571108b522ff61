"""Whether all nodes see the same data and can write the same output folder."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from steptron.config.schema import PretrainConfig
from steptron.data.errors import DataError
from steptron.data.manifest import read_manifest
from steptron.platform.doctor import Check
from steptron.platform.nodes.peers import Peer, name_ranks, ranks_by_node
from steptron.platform.nodes.roll import Roll

SECTION = "shared folders"

_PATIENCE_SECONDS = 30.0  # network file systems show another node's new file late: NFS keeps attributes for up to 60 s
_POLL_SECONDS = 0.1


def own_data(config: PretrainConfig) -> dict[str, dict[str, str]]:
    """What this process finds at each dataset folder: its content ``hash``, or the ``error`` why it cannot be used.

    The manifest's hash is taken, not computed again; files whose sizes contradict the manifest are told.
    """
    found = {}
    for path in dict.fromkeys(dataset.path for dataset in [*config.data.train, *config.data.validation]):
        try:
            manifest = read_manifest(path)
            damaged = [name for name, record in manifest.files.items() if _size(path / name) != record.size]
            found[str(path)] = {"hash": manifest.content_hash}
            if damaged:
                found[str(path)] = {"error": f"missing or cut: {', '.join(damaged)}"}
        except (DataError, OSError) as error:
            found[str(path)] = {"error": str(error)}
    return found


def judge_data(found: Sequence[dict[str, dict[str, str]]], peers: Sequence[Peer]) -> list[Check]:
    """One line per dataset folder.

    Args:
        found: what ``own_data`` returned on each process.
        peers: all processes.
    """
    checks = []
    for path in found[0]:
        broken = [rank for rank, own in enumerate(found) if "error" in own[path]]
        if broken:
            advice = f"{name_ranks(broken, peers)}: {found[broken[0]][path]['error']}"
            checks.append(Check(SECTION, path, "failed", f"cannot be used by {len(broken)} processes", advice))
            continue
        hashes = [own[path]["hash"] for own in found]
        common = max(dict.fromkeys(hashes), key=hashes.count)
        others = [rank for rank, value in enumerate(hashes) if value != common]
        if others:
            advice = f"{hashes[others[0]][:12]} on {name_ranks(others, peers)}, {common[:12]} elsewhere: copy it again"
            checks.append(Check(SECTION, path, "failed", "not the same content", advice))
        else:
            checks.append(Check(SECTION, path, "ok", f"content {common[:12]} for all processes"))
    return checks


def exchange_tokens(roll: Roll, output: Path) -> list[Check] | None:
    """Each node's first process reads what rank 0 wrote to a folder, and rank 0 what each of them wrote.

    What is written is removed again, the folder too where it was not there before.

    Args:
        roll: all processes.
        output: the folder.

    Returns:
        The folder's line, on rank 0; None elsewhere.
    """
    leaders = [ranks[0] for ranks in ranks_by_node(roll.peers)]
    patience = min(_PATIENCE_SECONDS, roll.timeout / 2)
    token = roll.tell("token", secrets.token_hex(8) if roll.is_first else None)
    missing: list[Path] = []
    error: str | None = None
    if roll.is_first:
        missing = _missing_ancestors(output)
        error = _attempt(_write, output, token, 0)
    written = roll.tell("token written", error is None)
    if written and roll.rank in leaders[1:]:
        missing = _missing_ancestors(output)
        error = _attempt(_read, output, token, 0, time.monotonic() + patience)
        error = error or _attempt(_write, output, token, roll.rank)
    said = roll.collect("tokens read", error, patience=2.0)
    errors: dict[int, str] = {}
    if said is not None:
        errors = {rank: said[rank] for rank in leaders if said[rank]}
        deadline = time.monotonic() + patience
        for rank in leaders[1:] if written else ():
            if rank not in errors and (unseen := _attempt(_read, output, token, rank, deadline)) is not None:
                errors[rank] = unseen
    roll.tell("tokens seen")
    if roll.rank in leaders:
        _remove(_file(output, token, roll.rank), missing)
    roll.collect("tokens removed", None)
    if not roll.is_first:
        return None
    _remove(_file(output, token, 0), missing)  # again: now the folder is empty
    if not errors:
        return [Check(SECTION, str(output), "ok", f"written and read by {len(leaders)} nodes")]
    advice = f"{name_ranks(errors, roll.peers)}: {errors[min(errors)]}"
    return [Check(SECTION, str(output), "failed", f"not shared, or not writable, on {len(errors)} nodes", advice)]


def _missing_ancestors(folder: Path) -> list[Path]:
    """The folder and those above it that do not exist, the deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _file(output: Path, token: str, rank: int) -> Path:
    return output / f".doctor-{token}-{rank}"


def _write(output: Path, token: str, rank: int) -> None:
    output.mkdir(parents=True, exist_ok=True)
    _file(output, token, rank).write_text(f"{token} {rank}")


def _read(output: Path, token: str, rank: int, deadline: float) -> None:
    """Waits until another node's file is there."""
    file = _file(output, token, rank)
    while True:
        with contextlib.suppress(OSError):
            list(output.iterdir())  # makes some network file systems look again
            if file.read_text() == f"{token} {rank}":
                return
        if time.monotonic() > deadline:
            raise OSError(f"the file that rank {rank} wrote there is not seen by another node")
        time.sleep(_POLL_SECONDS)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _attempt(action: Callable[..., None], *arguments: Any) -> str | None:
    try:
        action(*arguments)
    except OSError as error:
        return str(error)
    return None


def _remove(file: Path, missing: Sequence[Path]) -> None:
    """Removes a file, and the folders that were not there before if nothing else is in them."""
    with contextlib.suppress(OSError):
        file.unlink()
    for folder in missing:
        with contextlib.suppress(OSError):
            folder.rmdir()
