"""The checkpoints in a folder that a user names, whatever their state. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from steptron.checkpoint.folder import MANIFEST, list_checkpoints, partial_folders, run_of
from steptron.checkpoint.manifest import Manifest, read_manifest
from steptron.checkpoint.verification import problems
from steptron.errors import UserError

_RELEASED = ("config.json", "*.safetensors")

LEFTOVER = "being written, or left by a save or deletion that did not end"
"""What a partial folder is."""


@dataclass(frozen=True)
class Found:
    """What lies in a folder.

    Attributes:
        run: the run's folder; None where the folder is a checkpoint itself.
        checkpoints: oldest first.
        partial: what killed saves and deletions have left.
    """

    run: Path | None
    checkpoints: list[Path]
    partial: list[Path] = field(default_factory=list)


def find(path: Path) -> Found:
    """The checkpoint in a folder, or all of a run.

    Args:
        path: a checkpoint, a run's folder, or the folder ``checkpoints`` in it.

    Raises:
        UserError: there is neither; the message says what is there instead.
    """
    if (path / MANIFEST).is_file():
        return Found(None, [path])
    run = run_of(path)
    root = run / "checkpoints"
    if not root.is_dir():
        raise UserError(_what_is_wrong(path))
    found = Found(run, list_checkpoints(run), partial_folders(root))
    if not (found.checkpoints or found.partial):
        raise UserError(f"{run} has no checkpoint yet: {root} is empty")
    return found


@dataclass(frozen=True)
class Overview:
    """A checkpoint at first sight.

    Attributes:
        folder: where it lies.
        manifest: None where it cannot be read.
        faults: files that are missing or have another size than was written, as
            :func:`steptron.checkpoint.verification.problems` names them.
        num_bytes: of all files in the folder.
    """

    folder: Path
    manifest: Manifest | None
    faults: tuple[str, ...]
    num_bytes: int


def overview(folder: Path) -> Overview:
    """Reads a checkpoint's manifest and looks at the sizes of its files.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        manifest = read_manifest(folder)
    except UserError:
        manifest = None
    return Overview(folder, manifest, tuple(problems(folder, contents=False)), folder_bytes(folder))


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def layout_text(manifest: Manifest) -> str:
    """The layout of the processes that wrote a checkpoint, such as ``4: PP2 EP2 DP2``; sizes of 1 are left out."""
    sizes = {name: int(manifest.layout.get(name, 1)) for name in ("pipeline", "virtual_pipeline", "tensor", "context")}
    ranks = manifest.processes // (sizes["pipeline"] * sizes["tensor"] * sizes["context"])
    short = {
        "PP": sizes["pipeline"],
        "VPP": sizes["virtual_pipeline"],
        "TP": sizes["tensor"],
        "CP": sizes["context"],
        "EP": int(manifest.layout.get("expert", 1)),
        "DP": ranks,
    }
    parts = [f"{name}{size}" for name, size in short.items() if size > 1]
    return f"{manifest.processes}: {' '.join(parts)}" if manifest.layout and parts else str(manifest.processes)


def _what_is_wrong(path: Path) -> str:
    if not path.exists():
        return f"{path} does not exist"
    if not path.is_dir():
        return f"{path} is a file: name a checkpoint's folder or a run's"
    if (path / _RELEASED[0]).is_file() and list(path.glob(_RELEASED[1])):
        return (
            f"{path} is a released model, which has neither manifest nor checksums: `steptron checkpoint import-hf` "
            "makes a checkpoint of it, `steptron checkpoint compare` compares it"
        )
    if path.name.startswith("step_") or list(path.glob("*.distcp")):
        return f"{path} is not a complete checkpoint: {MANIFEST}, which is written last, is missing"
    return f"{path} is not a checkpoint: expected a folder with {MANIFEST}, or a run's folder with checkpoints/step_*"
