"""A released folder becomes one of our checkpoints, streamed.

The checkpoint has Megatron-Core's torch_dist layout: files of torch's distributed checkpoint with the key
``model.<logical matrix name>`` for every whole matrix, which any layout reads. Large tensors are stored in pieces of
their first axis: a process holds one piece at a time, and ranks that need a part (their experts, their vocabulary)
later read little more than that.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from steptron.checkpoint.checksums import FileSum, file_sums
from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.manifest import MODEL, Manifest
from steptron.checkpoint.matrices import PREFIX
from steptron.checkpoint.released import companions
from steptron.checkpoint.released.folder import ReleasedFolder
from steptron.checkpoint.released.names import ReleasedTensor
from steptron.checkpoint.released.output import check_output, check_space
from steptron.checkpoint.released.processes import Report, Transfer, on_every_rank, transfer_group
from steptron.checkpoint.saving import complete, stamp
from steptron.checkpoint.shared_staging import shared_staging_folder
from steptron.checkpoint.shares import share_out
from steptron.checkpoint.weights import ReleasedWeights
from steptron.config.schema import ModelConfig
from steptron.config.tree import dump
from steptron.errors import UserError
from steptron.platform.distributed import gather_to_all, on_first_rank
from steptron.platform.staging import publish

PIECE_BYTES = 256 * 2**20
"""Largest piece of a tensor that a process holds."""

_TORCH_DIST = CheckpointingConfig(sharded_backend="torch_dist", sharded_backend_version=1)


def import_released(source: Path, output: Path, *, force: bool, report: Report) -> Transfer:
    """Writes the checkpoint ``output`` with the weights and companion files of a released folder. Collective.

    Everything goes to a temporary folder beside ``output`` that is renamed at the end and removed after a failure.
    The default process group must exist; its processes share the work by bytes.

    Args:
        source: folder in the released layout.
        output: folder to write.
        force: replace a checkpoint that is there, once the new one is complete.
        report: told of this process's progress.

    Raises:
        ConfigError: lists every missing, extra, wrongly shaped and wrongly typed tensor, file and key of
            ``config.json``; nothing has been written.
        UserError: ``output`` must not be replaced, a file cannot be read or written, or the disk is full. Raised on
            every process, whichever of them failed.
    """
    weights = ReleasedWeights(source)
    total = sum(tensor.num_bytes(weights.precision) for tensor in weights.expected)
    pieces = [piece for tensor in weights.expected for piece in _pieces(tensor, weights)]
    shares = share_out([piece.num_bytes for piece in pieces], dist.get_world_size())
    own = [pieces[index] for index in shares[dist.get_rank()]]
    title = f"{output} not written"

    def check() -> None:
        check_output(output, source, force, "a checkpoint", [MANIFEST])
        output.parent.mkdir(parents=True, exist_ok=True)
        check_space(output, total)

    on_first_rank(title, check)
    with shared_staging_folder(output, title) as folder:
        group = transfer_group()
        _write(own, weights.folder, folder, title, report, group)
        mine: dict[str, FileSum] = {}

        def add_up() -> None:
            mine.update(file_sums(folder, [file.name for file in folder.glob(f"__{dist.get_rank()}_*")]))

        # With the patience of a transfer: to read what was written, or to delete what is replaced, may take long.
        on_every_rank(title, add_up, group)
        sums = gather_to_all(mine, group)

        def conclude() -> None:
            if dist.get_rank() == 0:
                # Once more: another import may have written it in the meantime.
                check_output(output, source, force, "a checkpoint", [MANIFEST])
                _conclude(folder, output, source, weights.model, sums)

        on_every_rank(title, conclude, group)
    return Transfer(len(weights.expected), total)


@dataclass(frozen=True)
class _Piece:
    """Rows ``start`` to ``stop`` of the first axis of a tensor."""

    tensor: ReleasedTensor
    dtype: torch.dtype
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.tensor.shape[1:])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(PREFIX + self.tensor.matrix.name, self._offset)

    @property
    def _offset(self) -> torch.Size:
        return torch.Size([self.start, *[0] * (len(self.tensor.shape) - 1)])

    def write_item(self) -> WriteItem:
        return WriteItem(
            index=self.index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=self._offset, sizes=torch.Size(self.shape)),
                properties=TensorProperties(dtype=self.dtype),
                size=torch.Size(self.tensor.shape),
            ),
        )


def _pieces(tensor: ReleasedTensor, weights: ReleasedWeights) -> Iterator[_Piece]:
    _, dtype = weights.shapes()[tensor.name]
    rows = tensor.shape[0]
    most = max(1, PIECE_BYTES // (math.prod(tensor.shape[1:]) * dtype.itemsize))
    for start in range(0, rows, most):
        yield _Piece(tensor, dtype, start, min(start + most, rows))


class _StreamingPlanner(DefaultSavePlanner):
    """Reads each piece when the writer asks for it, and lets go of the one before."""

    def __init__(self, pieces: Sequence[_Piece], read: Callable[[_Piece], torch.Tensor]) -> None:
        super().__init__()
        self._pieces = {(piece.index.fqn, piece.index.offset): piece for piece in pieces}
        self._read = read
        self._held: torch.Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        items = [piece.write_item() for piece in self._pieces.values()]
        self.plan = SavePlan(items, planner_data={item.index.fqn: (item.index.fqn,) for item in items})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        if self._held is not None:
            # The writer keeps every tensor of a file until the file is closed: what it keeps is emptied.
            self._held.untyped_storage().resize_(0)
        self._held = self._read(self._pieces[index.fqn, index.offset])
        return self._held


def _write(
    pieces: Sequence[_Piece],
    source: ReleasedFolder,
    folder: Path,
    title: str,
    report: Report,
    group: dist.ProcessGroup,
) -> None:
    total, done = sum(piece.num_bytes for piece in pieces), 0

    def read(piece: _Piece) -> torch.Tensor:
        nonlocal done
        report(done, total)
        done += piece.num_bytes
        return source.read(piece.tensor.name, [slice(piece.start, piece.stop)])

    # On a machine with a GPU, anything but 0 would make the writer look ahead.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    try:
        dcp.save({}, storage_writer=writer, planner=_StreamingPlanner(pieces, read), process_group=group)
    except CheckpointException as error:
        # torch's own, which gathers the failures of all ranks and wraps an interruption, too.
        failures = [failure for failure, _ in error.failures.values()]
        if any(isinstance(failure, KeyboardInterrupt) for failure in failures):
            raise KeyboardInterrupt from error
        failure = failures[0]
        if isinstance(failure, UserError):
            raise UserError(f"{title}: {failure}") from error
        # torch's writer hides the system's reason, which mostly is a full disk.
        free = shutil.disk_usage(folder.parent).free
        raise UserError(f"{title}: {failure} (the disk has {free:,} bytes left)") from error
    report(total, total)


def _conclude(
    folder: Path, output: Path, source: Path, model: ModelConfig, sums: Sequence[Mapping[str, FileSum]]
) -> None:
    save_config(_TORCH_DIST, str(folder))
    torch.save({}, folder / COMMON_STATE_FNAME)
    (folder / MODEL).write_text(dump({"model": model.model_dump()}))
    companions.keep(source, folder)
    manifest = Manifest(**stamp(), processes=dist.get_world_size(), progress=None, files={})
    complete(folder, manifest, {name: total for own in sums for name, total in own.items()})
    publish(folder, output)
