"""``steptron checkpoint inspect``: what a checkpoint holds, or which checkpoints a run has."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steptron.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from steptron.checkpoint.found import Found, Overview
    from steptron.checkpoint.manifest import Manifest
    from steptron.checkpoint.stored_tensors import StoredTensor

_KINDS = {
    "*.distcp": "tensors",
    ".metadata": "list of tensors",
    "common.pt": "list of tensors",
    "metadata.json": "list of tensors",
    "config.yaml": "configuration",
    "model.yaml": "configuration",
}
_OTHER = "tokenizer and others"


def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint, or a run's folder: all its checkpoints.")],
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="PATTERN", help="List tensors by key, such as '*' or 'model.layers.3.*'."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show a run's checkpoints, or what one of them holds.

    Files are only looked at by their size; `verify` reads them.
    """
    from steptron.checkpoint.found import find

    found = find(path)
    try:
        if found.run is None:
            _show_checkpoint(found.checkpoints[0], tensors, as_json)
            return
        if tensors is not None:
            raise UserError(f"--tensors lists those of one checkpoint: name one in {path}/checkpoints")
        _show_run(found, as_json)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


# -------------------------------------------------------------------------------------------- run


def _show_run(found: Found, as_json: bool) -> None:
    from steptron.checkpoint.found import LEFTOVER, folder_bytes, overview

    overviews = [overview(folder) for folder in found.checkpoints]
    leftovers = {folder: folder_bytes(folder) for folder in found.partial}
    if as_json:
        listed = [_checkpoint_json(one) for one in overviews]
        left = [{"folder": str(folder), "bytes": size} for folder, size in leftovers.items()]
        typer.echo(json.dumps({"run": str(found.run), "checkpoints": listed, "leftovers": left}, indent=2))
        return
    console = _console()
    if overviews:
        console.print(_run_table(overviews))
    for one in overviews:
        for fault in one.faults:
            console.print(f"{one.folder.name}: {fault}")
    for folder, size in leftovers.items():
        console.print(f"{folder}: not a checkpoint: {LEFTOVER} ({size:,} bytes)", soft_wrap=True)
    total = sum(one.num_bytes for one in overviews) + sum(leftovers.values())
    console.print(f"{len(overviews)} checkpoint{'' if len(overviews) == 1 else 's'}, {total:,} bytes in {found.run}")


def _run_table(overviews: Sequence[Overview]) -> Any:
    from steptron.checkpoint.found import layout_text

    table = _table(("step", "tokens", "validation loss", "bytes"), ("written", "processes", "state by sizes"))
    for one in overviews:
        manifest = one.manifest
        state = "damaged" if one.faults else "whole"
        if manifest is None or manifest.progress is None:
            table.add_row(one.folder.name, "", "", f"{one.num_bytes:,}", "", "", state)
            continue
        loss = manifest.validation_loss
        table.add_row(
            f"{manifest.progress.step:,}",
            f"{manifest.progress.consumed_tokens:,}",
            "" if loss is None else f"{loss:.4f}",
            f"{one.num_bytes:,}",
            _time(manifest),
            layout_text(manifest),
            state,
        )
    return table


# ------------------------------------------------------------------------------------- checkpoint


def _show_checkpoint(folder: Path, pattern: str | None, as_json: bool) -> None:
    from steptron.checkpoint.found import overview
    from steptron.checkpoint.manifest import read_manifest
    from steptron.checkpoint.stored_tensors import stored_tensors

    manifest = read_manifest(folder)
    one = overview(folder)
    tensors = stored_tensors(folder, manifest)
    picked = _picked(tensors, pattern)
    if as_json:
        content = _checkpoint_json(one) | {"files": _files_json(manifest), "groups": _groups_json(tensors)}
        if pattern is not None:
            content["tensors"] = _tensors_json(picked)
        typer.echo(json.dumps(content, indent=2))
        return
    console = _console()
    if pattern is not None:
        _print_tensors(console, picked)
        return
    _print_facts(console, one, manifest)
    _print_files(console, one, manifest)
    _print_groups(console, tensors)


def _picked(tensors: Mapping[str, StoredTensor], pattern: str | None) -> dict[str, StoredTensor]:
    if pattern is None:
        return {}
    picked = {key: tensor for key, tensor in tensors.items() if fnmatch.fnmatchcase(key, pattern)}
    if not picked:
        raise UserError(
            f"--tensors {pattern!r}: no tensor has such a key; keys are like {next(iter(tensors), 'model.*')}"
        )
    return picked


def _print_facts(console: Console, one: Overview, manifest: Manifest) -> None:
    from steptron.checkpoint.found import layout_text

    lines = [("folder", str(one.folder)), ("written", f"{_time(manifest)} UTC")]
    lines.append(
        (
            "by",
            f"steptron {manifest.steptron_version}, torch {manifest.torch_version}, "
            f"megatron-core {manifest.megatron_version}",
        )
    )
    lines.append(("processes", layout_text(manifest)))
    lines += [
        (f"  {name}", str(value)) for name, value in manifest.layout.items() if name == "pipeline_layout" and value
    ]
    progress = manifest.progress
    if progress is None:
        lines.append(("holds", "a model alone, without the state of a run"))
    else:
        consumed = f"{progress.consumed_sequences:,} sequences, {progress.consumed_tokens:,} tokens"
        lines += [("step", f"{progress.step:,} ({manifest.optimizer_steps:,} updates)"), ("consumed", consumed)]
        if progress.left_out_sequences:
            lines.append(("left out", f"{progress.left_out_sequences:,} sequences, by roll-backs"))
        loss = manifest.validation_loss
        lines.append(("validation", "not validated at this step" if loss is None else f"{loss:.6f} nats"))
        lines.append(("data", ", ".join(manifest.datasets) or "not known"))
    lines.append(("state", "whole, by the files' sizes" if not one.faults else "damaged"))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        console.print(f"{name:<{width}}  {text}", soft_wrap=True)
    for fault in one.faults:
        console.print(f"  {fault}", soft_wrap=True)


def _print_files(console: Console, one: Overview, manifest: Manifest) -> None:
    from steptron.checkpoint.verification import unknown_files

    table = _table(("files", "bytes"), (), first="kind")
    for kind, files, size in _files_by_kind(manifest):
        table.add_row(kind, f"{files:,}", f"{size:,}")
    console.print(table)
    for name in unknown_files(one.folder, manifest):
        console.print(f"not in the manifest: {name}", soft_wrap=True)


def _print_groups(console: Console, tensors: Mapping[str, StoredTensor]) -> None:
    from steptron.checkpoint.stored_tensors import groups

    table = _table(("tensors", "elements", "bytes"), ("dtype",), first="kind")
    for group in groups(tensors):
        table.add_row(
            group.name,
            f"{group.num_tensors:,}",
            f"{group.num_elements:,}",
            f"{group.num_bytes:,}",
            ", ".join(group.dtypes),
        )
    console.print(table)


def _print_tensors(console: Console, tensors: Mapping[str, StoredTensor]) -> None:
    from steptron.checkpoint.stored_tensors import dtype_name

    rows = [
        (key, str(list(tensor.shape)), dtype_name(tensor.dtype), f"{tensor.num_bytes:,}")
        for key, tensor in tensors.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for key, shape, dtype, size in rows:
        line = f"{key:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        console.print(line, soft_wrap=True)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    console.print(f"\n{len(rows):,} tensors, {total:,} bytes")


def _files_by_kind(manifest: Manifest) -> list[tuple[str, int, int]]:
    """Kind of file, number and bytes, in the order of the kinds."""
    kinds = {name: _kind(name) for name in manifest.files}
    order = [*dict.fromkeys(_KINDS.values()), _OTHER]
    return [
        (kind, len(names), sum(manifest.files[name].bytes for name in names))
        for kind in order
        if (names := [name for name, own in kinds.items() if own == kind])
    ]


def _kind(name: str) -> str:
    return next((kind for pattern, kind in _KINDS.items() if fnmatch.fnmatchcase(name, pattern)), _OTHER)


# ------------------------------------------------------------------------------------------- JSON


def _checkpoint_json(one: Overview) -> dict[str, Any]:
    facts = {} if one.manifest is None else one.manifest.model_dump(mode="json", exclude={"files"})
    return {"folder": str(one.folder), "bytes": one.num_bytes, "problems": list(one.faults), **facts}


def _files_json(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {"name": name, "kind": _kind(name), "bytes": file.bytes, "xxh3_128": file.xxh3_128}
        for name, file in manifest.files.items()
    ]


def _groups_json(tensors: Mapping[str, StoredTensor]) -> list[dict[str, Any]]:
    from steptron.checkpoint.stored_tensors import groups

    return [
        {
            "kind": group.name,
            "tensors": group.num_tensors,
            "elements": group.num_elements,
            "bytes": group.num_bytes,
            "dtypes": list(group.dtypes),
        }
        for group in groups(tensors)
    ]


def _tensors_json(tensors: Mapping[str, StoredTensor]) -> list[dict[str, Any]]:
    from steptron.checkpoint.stored_tensors import dtype_name

    return [
        {"key": key, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "bytes": tensor.num_bytes}
        for key, tensor in tensors.items()
    ]


# ----------------------------------------------------------------------------------------- output


def _time(manifest: Manifest) -> str:
    return manifest.written_at.removesuffix("+00:00").replace("T", " ")


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    # Where nobody sees a width, nothing is cut off to fit it.
    return console if console.is_terminal else Console(highlight=False, markup=False, emoji=False, width=200)


def _table(numbers: Iterable[str], texts: Iterable[str], first: str | None = None) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if first is not None:
        table.add_column(first)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for heading in texts:
        table.add_column(heading)
    return table
