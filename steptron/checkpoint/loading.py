"""Loading a run's state, whatever layout it was saved under."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from steptron.checkpoint.manifest import Progress, read_manifest
from steptron.checkpoint.matrices import FAILURES, what_failed
from steptron.checkpoint.stored_tensors import dtype_name
from steptron.checkpoint.tensors import matrix_name, model_tensors, optimizer_tensors, random_tensors
from steptron.checkpoint.verification import problems
from steptron.errors import UserError
from steptron.model.chunks import ModelChunks
from steptron.optim.base import Optimizer
from steptron.parallel.mesh import Mesh
from steptron.platform.distributed import gather_to_all
from steptron.platform.random_state import set_random_states


def load(
    folder: Path, model: ModelChunks, optimizer: Optimizer, mesh: Mesh, newly_trained: Collection[str] = ()
) -> Progress:
    """Restores parameters, router biases, optimizer state and random generators; returns how far the run had come.

    Generators go on where each rank's stopped when as many processes load as have saved; otherwise they stay as they
    are. Optimizer state of parameters that the run has frozen since is left out, and that of ``newly_trained`` logical
    matrices begins as a new run's does. Collective.

    Raises:
        UserError: on every rank: the checkpoint cannot be read, or does not fit: the message names every tensor that
            any rank needs and that is missing or has another shape or dtype, and what the checkpoint has besides.
    """
    manifest = read_manifest(folder)
    if manifest.progress is None:
        raise UserError(f"{folder} holds a model alone, not the state of a run")
    state = optimizer_tensors(optimizer)
    state = {key: tensor for key, tensor in state.items() if matrix_name(tensor.key) not in newly_trained}
    tensors = model_tensors(model, mesh) | state
    stored = _stored(folder)
    _check_matches(folder, model, tensors, stored)
    states = {key: state for key, state in random_tensors().items() if stored.get(key) == _form(state)}
    load_tensors(folder, tensors | states)
    start_masters(optimizer, newly_trained)
    if states:
        set_random_states({key.removeprefix("random."): state.data[0] for key, state in states.items()})
    optimizer.set_num_steps(manifest.optimizer_steps)
    return manifest.progress


@torch.no_grad()
def start_masters(optimizer: Optimizer, matrices: Collection[str]) -> None:
    """Sets the fp32 weights behind narrower parameters that hold any of these logical matrices to their values."""
    for state in optimizer.state().get("master", ()):
        if any(part.matrix.name in matrices for part in state.owned.piece.shard.matrices):
            state.tensor.copy_(state.owned.weight)


@torch.no_grad()
def load_tensors(folder: Path, tensors: dict[str, ShardedTensor]) -> None:
    """Copies what a checkpoint holds into the data of the given tensors, converted to their dtypes.

    Raises:
        UserError: a file is missing, truncated or damaged.
    """
    targets = {key: sharded.data for key, sharded in tensors.items()}
    try:
        loaded = dist_checkpointing.load(dict(tensors), str(folder))
    except FAILURES as error:
        damaged = "; ".join(problems(folder, contents=False))
        raise UserError(f"{folder} cannot be loaded: {damaged or what_failed(error)}") from error
    for key, target in targets.items():
        target.copy_(loaded[key])


Form = tuple[list[int], torch.dtype]
"""Shape of a whole tensor, and its dtype."""


def _form(tensor: ShardedTensor) -> Form:
    return list(tensor.global_shape), tensor.dtype


def _stored(folder: Path) -> dict[str, Form]:
    """The tensors in a checkpoint, by key."""
    try:
        entries = dist_checkpointing.load_tensors_metadata(str(folder))
    except FAILURES as error:
        raise UserError(f"{folder} cannot be read as a checkpoint: {type(error).__name__}: {error}") from error
    return {key: _form(entry) for key, entry in entries.items()}


def _check_matches(
    folder: Path, model: ModelChunks, tensors: Mapping[str, ShardedTensor], stored: Mapping[str, Form]
) -> None:
    needed = {tensor.key: _form(tensor) for tensor in tensors.values()}
    wrong = {key: f"{key} is missing" for key in needed if key not in stored}
    for key in needed.keys() & stored.keys():
        (shape, dtype), (stored_shape, stored_dtype) = needed[key], stored[key]
        if stored_shape != shape:
            wrong[key] = f"{key} has shape {stored_shape}, the model needs {shape}"
        elif stored_dtype != dtype:
            wrong[key] = f"{key} is {dtype_name(stored_dtype)}, the model needs {dtype_name(dtype)}"
    wrong |= {key: f"{key} is not part of this optimizer's state" for key in _useless_state(needed, stored)}
    matrices = [matrix.name for parameter in model.spec.parameters() for matrix in parameter.matrices]
    known = {f"model.{name}" for name in matrices}
    wrong |= {key: f"{key} is not part of the model" for key in stored if key.startswith("model.") and key not in known}
    # A rank may find nothing wrong with what it holds and owns: all report what any has found, rather than load alone.
    wrong = {key: text for own in gather_to_all(wrong) for key, text in own.items()}
    if wrong:
        order = {name: number for number, name in enumerate(matrices)}
        keys = sorted(wrong, key=lambda key: (not key.startswith("model."), order.get(matrix_name(key), len(order))))
        shown = "\n  ".join(wrong[key] for key in keys[:20])
        shown += f"\n  and {len(keys) - 20} more" if len(keys) > 20 else ""
        raise UserError(f"checkpoint {folder} does not fit this model:\n  {shown}")


def _useless_state(needed: Mapping[str, Form], stored: Mapping[str, Form]) -> Iterator[str]:
    """Keys of stored optimizer state of another kind than this rank has of the same matrix; none of matrices that it
    has no state of: their owners see to them, and nobody where they are frozen."""
    owned = {matrix_name(key) for key in needed if key.startswith("optimizer.")}
    for key in stored:
        if key.startswith("optimizer.") and key not in needed and matrix_name(key) in owned:
            yield key
