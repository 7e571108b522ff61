"""A checkpoint as the processes of another layout would have written it.

Any layout reads any checkpoint. One that was written under the layout that reads it is read faster: every process finds
what it needs in files of its own, instead of parts in many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from steptron.checkpoint import loading
from steptron.checkpoint.manifest import Progress, read_manifest
from steptron.checkpoint.newest import problems_of_all
from steptron.checkpoint.relayout import check_target
from steptron.checkpoint.released.output import check_space
from steptron.checkpoint.saving import stamp, write
from steptron.checkpoint.shared_staging import shared_staging_folder
from steptron.checkpoint.stored_tensors import StoredTensor, group_of, stored_tensors
from steptron.checkpoint.tensors import model_tensors, optimizer_tensors
from steptron.checkpoint.verification import Report
from steptron.config.schema import PretrainConfig
from steptron.errors import UserError, some_of
from steptron.model.chunks import ModelChunks, build_chunks
from steptron.model.kernels import choose_kernels
from steptron.model.layer_spec import model_spec
from steptron.model.transformer_config import DTYPES, transformer_config
from steptron.optim.base import Optimizer
from steptron.optim.build import build_optimizer
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.parallel.sharded_model import buffer_plans, owned_pieces
from steptron.platform.distributed import gather_to_all, on_first_rank
from steptron.platform.staging import publish
from steptron_kernels.polar_express.choose import choose

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Resharded:
    """What was written.

    Attributes:
        num_tensors, num_bytes: whole tensors, and their size.
        keeps_random_states: the states of the random generators are in it; False where another number of processes
            than before would go on from them.
    """

    num_tensors: int
    num_bytes: int
    keeps_random_states: bool


def reshard(
    source: Path,
    output: Path,
    config: PretrainConfig,
    *,
    force: bool = False,
    report: Report = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Resharded:
    """Writes the state in a checkpoint once more, in the files of another layout. Collective; on the CPU.

    The source is tested first, byte by byte: what is damaged must not get new checksums. The new checkpoint goes to a
    temporary folder that is renamed at the end.

    Args:
        source: the checkpoint of a run.
        output: folder to write.
        config: as :func:`steptron.checkpoint.relayout.relayout` gives it, for as many processes as there are.
        force: replace a checkpoint that is there, once the new one is complete.
        report: told of the progress of this process's share of the test.
        say: told what begins.

    Raises:
        UserError: on every rank: the source is damaged or does not fit its configuration, ``output`` must not be
            replaced, or something cannot be written.
    """
    title = f"{output} not written"
    manifest = read_manifest(source)
    progress = manifest.progress
    assert progress is not None, "relayout has refused it"
    size = sum(file.bytes for file in manifest.files.values())

    def check() -> None:
        check_target(output, source, progress.step, force)
        output.parent.mkdir(parents=True, exist_ok=True)
        check_space(output, size)

    on_first_rank(title, check)
    if faults := problems_of_all(source, True, report):
        raise UserError("\n  ".join([f"{title}: {source} is damaged:", *faults]))
    stored = stored_tensors(source, manifest)
    say("reading")
    tensors = _read(source, config, stored, progress)
    _check_nothing_is_lost(source, tensors, stored)
    say("writing")
    new = manifest.model_copy(update=_told_anew(config))

    def appear() -> None:
        check_target(output, source, progress.step, force)  # once more: something may have been put there meanwhile
        publish(folder, output)

    with shared_staging_folder(output, title) as folder:
        write(folder, new, tensors, config, tokenizer=source)
        on_first_rank(title, appear)
    written = [tensor for key, tensor in stored.items() if _is_kept(key, tensor)]
    return Resharded(len(written), sum(tensor.num_bytes for tensor in written), bool(_random_states(stored)))


def _told_anew(config: PretrainConfig) -> dict[str, object]:
    """What the manifest of the new checkpoint says otherwise."""
    layout = config.parallel.model_dump(mode="json")
    return {**stamp(), "processes": dist.get_world_size(), "layout": layout, "files": {}}


def _read(
    source: Path, config: PretrainConfig, stored: Mapping[str, StoredTensor], progress: Progress
) -> dict[str, ShardedTensor]:
    """What this process holds of a run's state under its layout, with the values of the checkpoint."""
    mesh = build_mesh(config.parallel)
    chunks, optimizer = _state(_on_cpu(config), mesh)
    random = _random_states(stored)
    read = loading.load(source, chunks, optimizer, mesh)
    assert read == progress
    loading.load_tensors(source, random)
    return model_tensors(chunks, mesh) | optimizer_tensors(optimizer) | random


def _state(config: PretrainConfig, mesh: Mesh) -> tuple[ModelChunks, Optimizer]:
    """Model and optimizer as in training, but without memory for gradients."""
    spec = model_spec(config.model)
    engine = transformer_config(
        config.model,
        config.parallel,
        DTYPES[config.train.precision],
        deterministic=config.train.deterministic,
        kernels=choose_kernels(config.train, config.parallel, _CPU),
    )
    chunks = build_chunks(config, spec, engine, mesh)
    parameters = dict(chunks.named_parameters())
    owned = [
        piece
        for plan in buffer_plans(chunks, config.optimizer, mesh)
        for piece in owned_pieces(
            plan,
            parameters,
            mesh.replicas(plan.replicas).cell,
            chunks.embedding_is_copy,
            lambda parameter: torch.zeros((), dtype=torch.float32).expand(parameter.shape),
        )
    ]
    polar_express = choose(_CPU, native=False)
    return chunks, build_optimizer(config.optimizer, owned, polar_express, mesh.groups.tp, config.train.deterministic)


def _on_cpu(config: PretrainConfig) -> PretrainConfig:
    """The configuration with what is needed to hold the model here, whatever device trains it."""
    train = config.train.model_copy(update={"device": "cpu", "kernels": "plain", "products": "fp32"})
    exchange = {"dispatcher": "alltoall", "overlap_expert_communication": False}
    return config.model_copy(update={"train": train, "parallel": config.parallel.model_copy(update=exchange)})


def _random_states(stored: Mapping[str, StoredTensor]) -> dict[str, ShardedTensor]:
    """This process's row of the states of random generators; nothing where another number of processes wrote them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        key: ShardedTensor.from_rank_offsets(
            key, torch.empty(1, *tensor.shape[1:], dtype=tensor.dtype), (0, rank, size)
        )
        for key, tensor in stored.items()
        if group_of(key) == "random" and _is_kept(key, tensor)
    }


def _is_kept(key: str, tensor: StoredTensor) -> bool:
    return group_of(key) != "random" or tensor.shape[0] == dist.get_world_size()


def _check_nothing_is_lost(
    source: Path, tensors: Mapping[str, ShardedTensor], stored: Mapping[str, StoredTensor]
) -> None:
    """Every tensor of the checkpoint must be held by some process. Collective."""
    held = set().union(*gather_to_all({tensor.key for tensor in tensors.values()}))
    lost = [key for key, tensor in stored.items() if key not in held and _is_kept(key, tensor)]
    if lost:
        raise UserError(f"{source} holds what its own configuration has no place for: {some_of(lost)}")
