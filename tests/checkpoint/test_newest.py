"""A run goes on from its newest checkpoint that is whole, and says which it passed over and why."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.newest import newest_valid
from steptron.errors import UserError
from tests.checkpoint.made import flip, make
from tests.worker_pool import WorkerPool


def look(rank: int, world_size: int, output: Path, contents: bool) -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return newest_valid(output, contents, said.append), said


def fail_to_look(rank: int, world_size: int, output: Path) -> str:
    try:
        look(rank, world_size, output, True)
    except UserError as error:
        dist.barrier()
        return str(error)
    return ""


def test_damaged_ones_are_passed_over_and_their_files_named(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, look, tmp_path, True) == [(None, [])] * 2
    whole, short, flipped, unreadable = (make(tmp_path, step) for step in (10, 20, 30, 40))
    partial = tmp_path / "checkpoints" / "step_00000050.partial"
    partial.mkdir()
    (short / "__0_1.distcp").write_bytes(b"")
    (short / ".metadata").unlink()
    flip(flipped / "__1_0.distcp", 100)
    flip(unreadable / MANIFEST, 60)
    for folder, said in pool.run(3, look, tmp_path, True):
        assert folder == whole
        ignored, *passed = said
        assert ignored == f"ignored, not completely written: {partial}"
        assert [text.split()[1] for text in passed] == [str(unreadable), str(flipped), str(short)]
        assert "__1_0.distcp has other content" in passed[1]
        assert ".metadata is missing" in passed[2] and "__0_1.distcp has 0 bytes" in passed[2]
    # Sizes alone do not show a flipped bit in a shard; the manifest is read either way.
    assert [folder for folder, _ in pool.run(2, look, tmp_path, False)] == [flipped] * 2


def test_without_any_whole_one_nobody_begins_anew(pool: WorkerPool, tmp_path: Path) -> None:
    for step in (1, 2):
        (make(tmp_path, step) / "__0_0.distcp").unlink()
    for text in pool.run(2, fail_to_look, tmp_path):
        assert text.startswith(f"none of the 2 checkpoints in {tmp_path / 'checkpoints'} is whole")
