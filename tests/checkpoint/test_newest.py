"""A run goes on from its newest checkpoint that is whole, and says which it passed over and why."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.newest import Newest, newest_valid
from steptron.errors import UserError
from tests.checkpoint.made import flip, make
from tests.worker_pool import WorkerPool


def look(rank: int, world_size: int, output: Path, contents: bool) -> tuple[Newest, list[str]]:
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
    assert pool.run(2, look, tmp_path, True) == [(Newest(None, frozenset()), [])] * 2
    whole, short, flipped, unreadable, lost, renamed = (make(tmp_path, step) for step in (10, 20, 30, 40, 45, 46))
    partial = tmp_path / "checkpoints" / "step_00000050.partial"
    partial.mkdir()
    (short / "__0_1.distcp").write_bytes(b"")
    (short / ".metadata").unlink()
    flip(flipped / "__1_0.distcp", 100)
    flip(unreadable / MANIFEST, 60)
    (lost / MANIFEST).unlink()
    renamed = renamed.rename(renamed.with_name("step_00000300"))
    damaged = (renamed, lost, unreadable, flipped, short)
    for found, said in pool.run(3, look, tmp_path, True):
        assert found == Newest(whole, frozenset(damaged))
        ignored, *passed = said
        assert ignored == f"passed over, not completely written: {partial}"
        assert [text.split()[1] for text in passed] == list(map(str, damaged))
        assert "steptron.json says step 46, the folder's name 300" in passed[0]
        assert "steptron.json cannot be read: No such file" in passed[1]
        assert "__1_0.distcp has other content" in passed[3]
        assert ".metadata is missing" in passed[4] and "__0_1.distcp has 0 bytes" in passed[4]
    # Sizes alone do not show a flipped bit in a shard; the manifest is read either way.
    assert [found.folder for found, _ in pool.run(2, look, tmp_path, False)] == [flipped] * 2


def test_without_any_whole_one_nobody_begins_anew(pool: WorkerPool, tmp_path: Path) -> None:
    (make(tmp_path, 1) / "__0_0.distcp").unlink()
    (make(tmp_path, 2) / MANIFEST).unlink()
    for text in pool.run(2, fail_to_look, tmp_path):
        assert text.startswith(f"none of the 2 checkpoints in {tmp_path / 'checkpoints'} is whole")
