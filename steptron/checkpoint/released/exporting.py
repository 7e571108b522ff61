"""One of our checkpoints becomes a released folder, streamed, in files of a chosen size."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

import steptron
from steptron.checkpoint.released.companions import Companions
from steptron.checkpoint.released.folder import CONFIG, INDEX, SINGLE
from steptron.checkpoint.released.names import Precision, ReleasedTensor, released_tensors
from steptron.checkpoint.released.output import check_output, check_space
from steptron.checkpoint.released.processes import Report, Transfer, on_every_rank, transfer_group
from steptron.checkpoint.released.shards import Shard, plan_shards
from steptron.checkpoint.shares import share_out
from steptron.checkpoint.weights import CheckpointWeights, refuse_damaged, same_on_every_rank
from steptron.errors import ConfigError, UserError
from steptron.model.layer_spec import model_spec
from steptron.platform.distributed import on_first_rank
from steptron.platform.staging import publish

_PLAN = "plan.json"


def export_released(
    weights: CheckpointWeights,
    output: Path,
    *,
    max_shard_bytes: int,
    precision: Precision | None,
    companions_from: Path | None,
    force: bool,
    report: Report,
) -> Transfer:
    """Writes the released folder ``output`` with the weights of a checkpoint. Collective.

    Files are written to a temporary folder beside ``output`` that is renamed at the end. After an interruption it
    stays, and the next export of the same checkpoint with the same settings goes on with the files that it lacks.
    The default process group must exist; its processes share the files by bytes.

    Args:
        weights: an imported checkpoint or one of a run, written under any layout.
        output: folder to write.
        max_shard_bytes: most bytes of tensors in a file, except for a tensor that is larger.
        precision: of the exported tensors; that of the checkpoint when None. Router biases are always fp32.
        companions_from: released folder that the other files are taken from.
        force: replace a released folder that is there, once the new one is complete.
        report: told of this process's progress.

    Raises:
        ConfigError: the released layout cannot express the model, or a tensor has another shape; all are listed.
        UserError: ``output`` must not be replaced, a file cannot be read or written, or the disk is full. Raised on
            every process, whichever of them failed.
    """
    output = output.absolute()  # "." has no name
    weights = _same_on_every_rank(weights)
    precision = precision or weights.precision
    companions = Companions.of(weights.path, weights.model, weights.sequence_length, companions_from)
    config = companions.config(weights.model, precision)
    tensors = released_tensors(model_spec(weights.model))
    _check_shapes(weights, tensors)
    shards = plan_shards(tensors, precision, max_shard_bytes)
    total = sum(shard.num_bytes for shard in shards)
    title, folder, group = f"{output} not written", output.parent / f".{output.name}.exporting", transfer_group()
    lock = contextlib.ExitStack()
    missing: list[list[Shard]] = [[]]

    def prepare() -> None:
        check_output(output, weights.path, force, "a released model", [CONFIG, SINGLE, INDEX])
        if companions_from is not None:
            check_output(output, companions_from, True, "a released model", [CONFIG, SINGLE, INDEX])
        output.parent.mkdir(parents=True, exist_ok=True)
        lock.enter_context(_prepared(folder, _plan(weights.path, shards)))
        missing[0] = [shard for shard in shards if not shard.is_complete(folder)]
        check_space(output, sum(shard.num_bytes for shard in missing[0]))

    def finish() -> None:
        # What an export with other companion files has left.
        for path in folder.iterdir():
            if path.name not in {_PLAN, *(shard.file for shard in shards)}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        companions.write(folder, config)
        if len(shards) > 1:
            (folder / INDEX).write_text(json.dumps(_index(shards, total), indent=2) + "\n")
        plan = (folder / _PLAN).read_text()
        (folder / _PLAN).unlink()
        try:
            publish(folder, output)
        except OSError:
            (folder / _PLAN).write_text(plan)
            raise

    with lock:
        on_first_rank(title, prepare)
        dist.broadcast_object_list(missing, src=0)
        refuse_damaged(weights, group=group)
        try:
            on_every_rank(title, lambda: _write(weights, missing[0], folder, report), group)
        except UserError as error:
            raise UserError(
                f"{error}\nWhat is complete stays in {folder}: the same command goes on from there"
            ) from error
        # With the patience of a transfer: a replaced model may take long to delete.
        on_every_rank(title, finish if dist.get_rank() == 0 else lambda: None, group)
    return Transfer(len(tensors), total)


def _same_on_every_rank(weights: CheckpointWeights) -> CheckpointWeights:
    same = same_on_every_rank(weights)
    assert isinstance(same, CheckpointWeights), "a checkpoint stays one"
    return same


def _write(weights: CheckpointWeights, missing: Sequence[Shard], folder: Path, report: Report) -> None:
    """Writes this process's share of the missing files."""
    shares = share_out([shard.num_bytes for shard in missing], dist.get_world_size())
    own = [missing[index] for index in shares[dist.get_rank()]]
    total, done = sum(shard.num_bytes for shard in own), 0

    def wrote(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(done, total)

    for shard in own:
        shard.write(folder, weights.read, wrote)


def _check_shapes(weights: CheckpointWeights, tensors: Sequence[ReleasedTensor]) -> None:
    shapes = weights.shapes()
    problems = [
        f"{tensor.matrix.name} has shape {list(shapes[tensor.name][0])}, the model needs {list(tensor.shape)}"
        for tensor in tensors
        if shapes[tensor.name][0] != tensor.shape
    ]
    if problems:
        raise ConfigError(f"checkpoint {weights.path} does not fit its configuration", problems)


def _plan(source: Path, shards: Sequence[Shard]) -> str:
    """What the files of an export depend on; equal plans lead to equal files."""
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(source.iterdir())}
    return json.dumps(
        {
            "steptron_version": steptron.__version__,
            "source": str(source.resolve()),
            "source_files": files,
            "shards": {shard.file: [vars(entry) for entry in shard.entries] for shard in shards},
        },
        indent=1,
    )


@contextlib.contextmanager
def _prepared(folder: Path, plan: str) -> Iterator[None]:
    """Makes the temporary folder ready for a plan, and keeps other exports out of it.

    What another plan has left there is removed.

    Raises:
        UserError: another process writes there.
    """
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems have no locks (OSError): there, two exports to one folder are not told apart.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"another process exports to it, in {folder}") from error
        file = folder / _PLAN
        if not file.is_file() or file.read_text() != plan:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            file.write_text(plan)
        yield
    finally:
        os.close(descriptor)


def _index(shards: Sequence[Shard], total: int) -> dict[str, object]:
    return {
        "metadata": {"total_size": total},
        "weight_map": {entry.name: shard.file for shard in shards for entry in shard.entries},
    }
