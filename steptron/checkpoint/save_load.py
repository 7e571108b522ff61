"""Saving and loading, in Megatron-Core's distributed checkpoint format (torch_dist)."""

from __future__ import annotations

import contextlib
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

import steptron
from steptron.checkpoint.folder import MANIFEST, checkpoint_folder, prune
from steptron.checkpoint.manifest import CONFIG, FORMAT_VERSION, Manifest, Progress, read_manifest
from steptron.checkpoint.matrices import what_failed
from steptron.checkpoint.tensors import matrix_name, model_tensors, optimizer_tensors
from steptron.config.schema import PretrainConfig
from steptron.config.show import to_yaml
from steptron.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from steptron.errors import UserError
from steptron.model.chunks import ModelChunks
from steptron.optim.base import Optimizer
from steptron.parallel.mesh import Mesh
from steptron.platform.distributed import on_first_rank

TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
"""Copied from the training data, so that a checkpoint is enough to write text."""

_FAILURES = (Exception, CheckpointException)
"""A full disk, a lost folder, a truncated or missing shard show in as many forms as there are writers and readers;
torch's own, which gathers those of all ranks, is no ``Exception``."""


def save(
    config: PretrainConfig,
    progress: Progress,
    datasets: list[str],
    model: ModelChunks,
    optimizer: Optimizer,
    mesh: Mesh,
) -> Path:
    """Writes a checkpoint and prunes old ones.

    Everything goes to a temporary folder that is renamed at the end, the manifest last: a folder
    with a manifest is complete.

    Args:
        config: the run's configuration, which the checkpoint carries.
        progress: how far the run has come.
        datasets: content hashes of the training datasets.
        model, optimizer: what is saved.
        mesh: this process's place in the layout.

    Raises:
        UserError: the folder cannot be written (message names it and the reason).
    """
    final = checkpoint_folder(config.train.output, progress.step)
    temporary = final.with_suffix(".new.partial")
    on_first_rank("checkpoint not written", lambda: _prepare(temporary))
    tensors: dict[str, Any] = model_tensors(model, mesh) | optimizer_tensors(optimizer)
    try:
        with _results_in_this_process():
            dist_checkpointing.save(tensors, str(temporary), validate_access_integrity=True)
    except _FAILURES as error:
        raise UserError(f"checkpoint not written: {temporary}: {error}") from error
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        steptron_version=steptron.__version__,
        torch_version=torch.__version__,
        progress=progress,
        optimizer_steps=optimizer.num_steps,
        datasets=datasets,
    )
    on_first_rank("checkpoint not written", lambda: _publish(temporary, final, manifest, config))
    if dist.get_rank() == 0:
        prune(config.train.output, config.train.checkpoint.keep)
    return final


def load(folder: Path, model: ModelChunks, optimizer: Optimizer, mesh: Mesh) -> Progress:
    """Restores parameters, router biases and optimizer state; returns how far the run had come.

    Raises:
        UserError: on every rank: a tensor that any rank needs is missing or has another shape (message names it).
    """
    manifest = read_manifest(folder)
    if manifest.progress is None:
        raise UserError(f"{folder} holds a model alone, not the state of a run")
    tensors = model_tensors(model, mesh) | optimizer_tensors(optimizer)
    _check_matches(folder, model, tensors)
    load_tensors(folder, tensors)
    optimizer.set_num_steps(manifest.optimizer_steps)
    return manifest.progress


@torch.no_grad()
def load_tensors(folder: Path, tensors: dict[str, ShardedTensor]) -> None:
    """Copies what a checkpoint holds into the data of the given tensors, converted to their dtypes.

    Raises:
        UserError: a file is missing, truncated or damaged.
    """
    targets = {key: sharded.data for key, sharded in tensors.items()}
    try:
        loaded = dist_checkpointing.load(dict(tensors), str(folder))
    except _FAILURES as error:
        raise UserError(f"{folder} cannot be loaded: {what_failed(error)}") from error
    for key, target in targets.items():
        target.copy_(loaded[key])


def _check_matches(folder: Path, model: ModelChunks, tensors: dict[str, ShardedTensor]) -> None:
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(folder))
    except _FAILURES as error:
        raise UserError(f"{folder} cannot be read as a checkpoint: {type(error).__name__}: {error}") from error
    problems: dict[str, str] = {}
    for tensor in tensors.values():
        key, needed = tensor.key, list(tensor.global_shape)
        if key not in stored:
            problems[key] = f"{key} is missing"
        elif list(stored[key].global_shape) != needed:
            problems[key] = f"{key} has shape {list(stored[key].global_shape)}, the model needs {needed}"
    matrices = [matrix.name for parameter in model.spec.parameters() for matrix in parameter.matrices]
    known = {f"model.{name}" for name in matrices}
    problems |= {
        key: f"{key} is not part of the model" for key in stored if key.startswith("model.") and key not in known
    }
    # A rank may find nothing wrong with what it holds and owns: all report what any has found, rather than load alone.
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, problems)
    problems = {key: text for own in found for key, text in own.items()}
    if problems:
        order = {name: number for number, name in enumerate(matrices)}
        keys = sorted(problems, key=lambda key: (not key.startswith("model."), order.get(matrix_name(key), len(order))))
        shown = "\n  ".join(problems[key] for key in keys[:20])
        shown += f"\n  and {len(keys) - 20} more" if len(keys) > 20 else ""
        raise UserError(f"checkpoint {folder} does not fit this model:\n  {shown}")


@contextlib.contextmanager
def _results_in_this_process() -> Iterator[None]:
    """Lets a synchronous save collect its results in a plain queue.

    Megatron-Core starts a manager process for that queue: seconds for the first save, a save that
    hangs when the manager dies, and a process left over when a rank is killed.
    """
    previous = filesystem_async._results_queue
    filesystem_async._results_queue = queue.SimpleQueue()
    try:
        yield
    finally:
        filesystem_async._results_queue = previous


def _prepare(temporary: Path) -> None:
    # What a killed save has left, of whatever step.
    for leftover in temporary.parent.glob("*.partial"):
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)


def _publish(temporary: Path, final: Path, manifest: Manifest, config: PretrainConfig) -> None:
    (temporary / CONFIG).write_text(to_yaml(config))
    for name in TOKENIZER_FILES:
        source = config.data.train[0].path / name
        if source.is_file():
            shutil.copy(source, temporary / name)
    (temporary / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    if final.exists():
        final.rename(final.with_suffix(".partial"))
    temporary.rename(final)
    shutil.rmtree(final.with_suffix(".partial"), ignore_errors=True)
