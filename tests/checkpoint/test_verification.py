"""Damage of a checkpoint is found and named."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path

import pytest

from steptron.checkpoint import checksums, verification
from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.manifest import CONFIG, read_manifest
from steptron.checkpoint.verification import problems, unknown_files
from tests.checkpoint.made import SIZES, flip, make

TOTAL = sum(SIZES.values())


def test_a_checkpoint_as_it_was_written_has_no_problems(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    for threads in (1, 3):
        told: list[tuple[int, int]] = []
        assert problems(folder, report=lambda *done, told=told: told.append(done), threads=threads) == []
        size = TOTAL + (folder / CONFIG).stat().st_size
        assert [total for _, total in told] == [size] * len(told)
        assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1] == (size, size)
    assert problems(folder, contents=False) == []


@pytest.mark.parametrize("name", [*SIZES, CONFIG])
def test_a_flipped_bit_is_found_in_any_file_but_not_by_sizes(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, 7)
    flip(folder / name, (folder / name).stat().st_size - 1)
    expected = [f"{name} has other content than was written (its checksum differs): it is damaged"]
    assert problems(folder) == problems(folder, threads=4) == expected
    assert problems(folder, contents=False) == []


def test_every_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    (folder / "__0_0.distcp").write_bytes(b"short")
    (folder / ".metadata").unlink()
    flip(folder / "__1_0.distcp", 0)
    found = problems(folder, threads=2)
    assert {text.split()[0] for text in found} == {"__0_0.distcp", ".metadata", "__1_0.distcp"}
    assert {text.split()[0] for text in problems(folder, contents=False)} == {"__0_0.distcp", ".metadata"}
    (folder / MANIFEST).unlink()
    assert problems(folder) == [f"{MANIFEST} cannot be read: No such file or directory"]


def test_readers_share_the_files_and_together_find_what_one_finds(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    for name in SIZES:
        flip(folder / name, 1)
    for readers in (2, 3, 8):
        shares = [problems(folder, share=(number, readers)) for number in range(readers)]
        assert sorted(text for share in shares for text in share) == sorted(problems(folder))
        assert max(map(len, shares)) <= -(-len(SIZES) // min(readers, len(SIZES)))


def test_files_that_the_manifest_does_not_know_are_reported_apart(tmp_path: Path) -> None:
    folder = make(tmp_path, 7)
    manifest = read_manifest(folder)
    assert unknown_files(folder, manifest) == []
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("x")
    (folder / "__9_0.distcp").symlink_to("nowhere")
    assert unknown_files(folder, manifest) == ["__9_0.distcp", "notes/mine.txt"]
    assert problems(folder) == []


def test_threads_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, 7)
    both = threading.Barrier(2, timeout=20)
    faulty: list[str] = []

    def meet(folder: Path, name: str, *others: object) -> None:
        if name.startswith("__0"):
            both.wait()
        faulty.append(name)

    monkeypatch.setattr(verification, "fault", meet)
    assert problems(folder, threads=2) == []
    assert sorted(faulty) == sorted([*SIZES, CONFIG])


def test_ctrl_c_ends_the_reading_in_the_middle_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, 7)
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 10)
    told: list[int] = []

    def interrupt(done: int, total: int) -> None:
        told.append(done)
        if len(told) == 1:
            _thread.interrupt_main()
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        problems(folder, report=interrupt)
    assert len(told) < TOTAL // 10 // 2
