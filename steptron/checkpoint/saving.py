"""Writing checkpoints while training goes on, in Megatron-Core's distributed format (torch_dist).

A save has three parts. Every process copies what it holds (the only part that training waits for); a thread of each
process writes the copy, with its checksums; when all have written, the first process adds the lists and the manifest
and renames the folder. Until that rename the checkpoint does not exist, after it it is complete.

Megatron-Core plans the save and gathers the list of tensors. Its own writer forks a process per file and waits for it
without a limit: a child that dies leaves the run hanging. A thread lives and dies with its process.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.storage import WriteResult

import steptron
from steptron.checkpoint.checksums import FileSum, file_sums
from steptron.checkpoint.folder import checkpoint_folder, delete_partial_folders, staging
from steptron.checkpoint.manifest import CONFIG, Manifest, Progress, StageRecord, write_manifest
from steptron.checkpoint.matrices import what_failed
from steptron.checkpoint.planner import Buckets, Plan, Planner
from steptron.checkpoint.tensor_file import write_tensor_file
from steptron.checkpoint.tensors import model_tensors, optimizer_tensors, random_tensors
from steptron.config.schema import PretrainConfig
from steptron.config.show import to_yaml
from steptron.config.stages import Stage
from steptron.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from steptron.errors import UserError
from steptron.model.chunks import ModelChunks
from steptron.optim.base import Optimizer
from steptron.parallel.mesh import Mesh
from steptron.platform.distributed import gather_to_all, on_first_rank
from steptron.platform.staging import publish

TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
"""Copied from the training data, so that a checkpoint is enough to write text."""

_TITLE = "checkpoint not written"


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        config: the run's configuration, which checkpoints carry.
        datasets: content hashes of the training datasets.
        mesh: this process's place in the layout.
        stage: of the run's curriculum, if it has one; ``config`` is then the stage's.
    """

    def __init__(self, config: PretrainConfig, datasets: Sequence[str], mesh: Mesh, stage: Stage | None = None) -> None:
        self._stage = stage
        self._config = config
        self._datasets = list(datasets)
        self._mesh = mesh
        self._planner = Planner()
        self._pending: _Pending | None = None

    def start(
        self,
        progress: Progress,
        model: ModelChunks,
        optimizer: Optimizer,
        validation_loss: float | None = None,
        requested: bool = False,
    ) -> None:
        """Copies the state of a run and begins to write it. Collective; no other save may be pending.

        Args:
            progress: how far the run has come.
            model, optimizer: what is saved; both may change as soon as this returns.
            validation_loss: of the main head at this step, nats, where it is known.
            requested: an alert asked for it.

        Raises:
            UserError: on every rank: the folder cannot be written (the message names it and the reason).
        """
        assert self._pending is None, "the save before is not finished"
        temporary = staging(self._config.train.output, progress.step)
        on_first_rank(_TITLE, lambda: _prepare(temporary))
        tensors = model_tensors(model, self._mesh) | optimizer_tensors(optimizer) | random_tensors()
        manifest = Manifest(
            **stamp(),
            processes=dist.get_world_size(),
            layout=self._config.parallel.model_dump(mode="json"),
            progress=progress,
            optimizer_steps=optimizer.num_steps,
            validation_loss=validation_loss,
            requested=requested,
            datasets=self._datasets,
            stage=None if self._stage is None else _record(self._stage, progress.step),
            files={},
        )
        self._pending = _begin(temporary, manifest, tensors, self._planner, changing=True)

    @property
    def is_pending(self) -> bool:
        """A save has been started and not been finished."""
        return self._pending is not None

    @property
    def is_written(self) -> bool:
        """This process has written its part of the pending save, or failed to."""
        return self._pending is not None and self._pending.writing.is_done

    def finish(self) -> Path:
        """Waits until every process has written its part and makes the checkpoint appear. Collective.

        Returns:
            The checkpoint's folder.

        Raises:
            UserError: on every rank: something could not be written (a full disk, a lost folder). What was written has
                been deleted; earlier checkpoints are as they were.
        """
        pending, self._pending = self._pending, None
        assert pending is not None and pending.manifest.progress is not None
        final = checkpoint_folder(self._config.train.output, pending.manifest.progress.step)
        try:
            sums = pending.collect()
            on_first_rank(_TITLE, lambda: self._publish(pending, sums, final))
        except UserError:
            # What takes up a full disk goes at once; after a lost folder there is nothing to delete.
            if dist.get_rank() == 0:
                shutil.rmtree(pending.temporary, ignore_errors=True)
            raise
        return final

    def _publish(self, pending: _Pending, sums: Mapping[str, FileSum], final: Path) -> None:
        _add_rest(pending, sums, self._config, self._config.data.train[0].path)
        publish(pending.temporary, final)


def write(
    folder: Path, manifest: Manifest, tensors: dict[str, ShardedTensor], config: PretrainConfig, tokenizer: Path
) -> None:
    """Writes a checkpoint into an empty folder, and waits for it. Collective.

    Args:
        folder: the folder, the same on every rank.
        manifest: what it says of itself; its files are filled in.
        tensors: what this process holds of the state, by any distinct names; must not change meanwhile.
        config: the run's configuration.
        tokenizer: a folder from which the tokenizer's files are taken, as far as they are there.

    Raises:
        UserError: on every rank: something could not be written.
    """
    pending = _begin(folder, manifest, tensors, Planner(), changing=False)
    sums = pending.collect()
    on_first_rank(_TITLE, lambda: _add_rest(pending, sums, config, tokenizer))


def complete(folder: Path, manifest: Manifest, sums: Mapping[str, FileSum]) -> None:
    """Writes the manifest, and to the disk what was not: all files but those whose checksums are known.

    Raises:
        OSError: a file whose checksum is known is gone; something cannot be written.
    """
    for name, total in sums.items():
        if (size := (folder / name).stat().st_size) != total.bytes:
            raise OSError(f"{folder / name} has {size:,} bytes instead of the {total.bytes:,} that were written")
    others = sorted(
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.name not in sums
    )
    for name in others:
        with (folder / name).open("rb") as stream:
            os.fsync(stream.fileno())
    write_manifest(folder, manifest.model_copy(update={"files": {**sums, **file_sums(folder, others)}}))


def save(
    config: PretrainConfig,
    progress: Progress,
    datasets: Sequence[str],
    model: ModelChunks,
    optimizer: Optimizer,
    mesh: Mesh,
) -> Path:
    """Writes one checkpoint and waits for it; see :class:`Saver`."""
    saver = Saver(config, datasets, mesh)
    saver.start(progress, model, optimizer)
    return saver.finish()


def _record(stage: Stage, step: int) -> StageRecord:
    return StageRecord(
        name=stage.name,
        first_sequence=stage.first_sequence,
        sequences=stage.sequences,
        ends=step == stage.last_step,
    )


def stamp() -> dict[str, str]:
    """What every manifest says of when and by which versions it was written."""
    return {
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "steptron_version": steptron.__version__,
        "torch_version": torch.__version__,
        "megatron_version": version("megatron-core"),
    }


def _begin(
    folder: Path, manifest: Manifest, tensors: Mapping[str, ShardedTensor], planner: Planner, changing: bool
) -> _Pending:
    """Begins to write tensors; ``changing`` says that they may change meanwhile, so that they are copied first."""
    plan = planner.plan(tensors)
    return _Pending(manifest, folder, plan, _Writing(folder, plan.staged(tensors if changing else {})))


def _add_rest(pending: _Pending, sums: Mapping[str, FileSum], config: PretrainConfig, tokenizer: Path) -> None:
    """On one process, when all tensors are written: the other files, and the manifest at last."""
    folder = pending.temporary
    pending.plan.write_lists(folder)
    (folder / CONFIG).write_text(to_yaml(config))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    complete(folder, pending.manifest, sums)


class _Writing:
    """Threads that write this process's files of a checkpoint, one each.

    Attributes:
        results: what Megatron-Core's writers leave for the list of tensors: the results by file.
        sums: of the files that are written, by name.
        failure: of one of the files.
    """

    def __init__(self, folder: Path, buckets: Buckets) -> None:
        self.results: dict[int, list[WriteResult]] = {}
        self.sums: dict[str, FileSum] = {}
        self.failure: Exception | None = None
        self._threads = [
            threading.Thread(target=self._write, args=(number, folder / name, items), name="checkpoint", daemon=True)
            for number, (name, items) in enumerate(buckets)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_done(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _write(self, number: int, file: Path, items: Any) -> None:
        try:
            self.results[number], self.sums[file.name] = write_tensor_file(file, *items)
        except Exception as error:
            self.failure = error


class _Pending:
    """A save that has been started."""

    def __init__(self, manifest: Manifest, temporary: Path, plan: Plan, writing: _Writing) -> None:
        self.manifest = manifest
        self.temporary = temporary
        self.plan = plan
        self.writing = writing

    def collect(self) -> dict[str, FileSum]:
        """Waits for all processes' writers and lets Megatron-Core write its lists; the checksums of all files that they
        wrote. Collective.

        Raises:
            UserError: a writer failed; on every rank.
        """
        self.writing.wait()
        failed = None if self.writing.failure is None else what_failed(self.writing.failure)
        gathered = gather_to_all((self.writing.sums, failed))
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(gathered) if text is not None]
        if failures:
            raise UserError(f"{_TITLE}: {self.temporary}: {'; '.join(failures[:8])}")
        self.plan.conclude(self.writing.results)
        return {name: total for sums, _ in gathered for name, total in sums.items()}


def _prepare(temporary: Path) -> None:
    delete_partial_folders(temporary.parent)
    temporary.mkdir(parents=True)
