"""Files that records are appended to, on disks that refuse them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from steptron.errors import UserError
from steptron.train.appended_file import AppendedFile
from tests.train.full_disk import no_file_beyond


class Messages(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, reason: int = errno.ENOSPC) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(f"steptron.train.appended_file.os.{function}", fail)


def test_what_a_full_disk_refuses_comes_later_in_order_and_whole(tmp_path: Path) -> None:
    path, messages = tmp_path / "folder" / "log", Messages()
    file = AppendedFile(path, messages)
    file.append(b"first line\n")
    with no_file_beyond(17):
        for number in range(5):
            file.append(b"line %d\n" % number)  # the kernel takes 6 bytes of the first
            assert path.read_bytes() == b"first line\n"
        assert messages == [f"{path} cannot be written (File too large): records are kept until it can be"]
    file.append(b"line 5\n")
    file.append(b"line 6\n")
    assert path.read_bytes() == b"first line\n" + b"".join(b"line %d\n" % number for number in range(7))
    assert messages[1:] == [f"{path} is written again: no record is lost (5 had waited)"]
    file.close()
    file.close()
    assert len(messages) == 2


def test_as_many_as_there_is_space_for_are_written(tmp_path: Path) -> None:
    path, messages = tmp_path / "log", Messages()
    file = AppendedFile(path, messages)
    with no_file_beyond(0):
        for number in range(4):
            file.append(b"line %d\n" % number)
    with no_file_beyond(3 * 7 + 2):
        file.append(b"line 4\n")
        assert path.read_bytes() == b"line 0\nline 1\nline 2\n"
    file.append(b"line 5\n")
    assert path.read_bytes() == b"".join(b"line %d\n" % number for number in range(6))
    assert len(messages) == 2


def test_half_a_record_is_cut_off_later_where_that_fails_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, messages = tmp_path / "log", Messages()
    file = AppendedFile(path, messages)
    file.append(b"one\n")
    with no_file_beyond(6), monkeypatch.context() as patch:
        refuse(patch, "ftruncate", errno.EIO)
        file.append(b"two\n")
        assert path.read_bytes() == b"one\ntw"
        file.append(b"three\n")
        assert path.read_bytes() == b"one\ntw"
    file.append(b"four\n")
    assert path.read_bytes() == b"one\ntwo\nthree\nfour\n"


def test_a_fault_that_shows_on_closing_loses_nothing_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS takes what is written and says only then that its disk is full; it may keep a part."""
    path, messages = tmp_path / "log", Messages()
    file = AppendedFile(path, messages)
    file.append(b"one\n")
    close = os.close

    def late(descriptor: int) -> None:
        os.ftruncate(descriptor, 6)
        close(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr("steptron.train.appended_file.os.close", late)
        file.append(b"two\n")
        file.append(b"three\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert [message.removeprefix(f"{path} ") for message in messages] == [
        "cannot be written (Disk quota exceeded): records are kept until it can be",
        "is written again: no record is lost (2 had waited)",
    ]


def test_what_is_lost_in_the_end_is_counted(tmp_path: Path) -> None:
    path, messages = tmp_path / "log", Messages()
    file = AppendedFile(path, messages)
    file.append(b"one\n")
    with no_file_beyond(6):
        file.append(b"two\n")
        file.append(b"three\n")
        with pytest.raises(UserError) as error:
            file.close()
        file.close()
    assert str(error.value) == f"{path} cannot be written (File too large): 2 records are lost"
    assert path.read_bytes() == b"one\n"
    assert len(messages) == 1
    with pytest.raises(ValueError, match="closed"):
        file.append(b"four\n")


def test_memory_is_bounded_and_the_newest_are_kept(tmp_path: Path) -> None:
    path, messages = tmp_path / "log", Messages()
    file = AppendedFile(path, messages, memory_bytes=21)
    with no_file_beyond(0):
        for number in range(10):
            file.append(b"line %d\n" % number)
    assert [message.removeprefix(f"{path} ") for message in messages] == [
        "cannot be written (File too large): records are kept until it can be",
        f"more than 21 bytes wait for {path}: the oldest records are lost",
    ]
    file.append(b"the end\n")
    assert path.read_bytes() == b"line 7\nline 8\nline 9\nthe end\n"
    assert messages[2:] == [f"{path} is written again: 7 records are lost (3 had waited)"]
    with pytest.raises(UserError) as error:
        file.close()
    assert str(error.value) == f"{path}: 7 records are lost"


def test_a_record_longer_than_the_memory_is_kept(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "log", Messages(), memory_bytes=3)
    with no_file_beyond(0):
        file.append(b"long\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"long\n"


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_folder_that_is_removed_comes_back(tmp_path: Path, is_torn: bool) -> None:
    path, messages = tmp_path / "run" / "muon" / "log", Messages()
    file = AppendedFile(path, messages)
    file.append(b"one\n")
    if is_torn:
        with no_file_beyond(2):
            file.append(b"two\n")
        messages.clear()
    shutil.rmtree(tmp_path / "run")
    file.append(b"three\n")
    file.append(b"four\n")
    file.close()
    assert path.read_bytes() == (b"two\n" if is_torn else b"") + b"three\nfour\n"
    assert messages[0] == f"{path} was moved or deleted under the run, which goes on in a new file"
    assert len(messages) == 1 + is_torn


def test_a_log_that_was_moved_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = AppendedFile(path, Messages())
    file.append(b"one\n")
    path.rename(tmp_path / "moved")
    file.append(b"two\n")
    assert ((tmp_path / "moved").read_bytes(), path.read_bytes()) == (b"one\n", b"two\n")


def test_only_a_full_disk_is_no_reason_not_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        AppendedFile(tmp_path / "file" / "log")
    messages = Messages()
    with monkeypatch.context() as patch:
        refuse(patch, "open")
        file = AppendedFile(tmp_path / "log", messages)
        file.append(b"one\n")
    file.append(b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert len(messages) == 2


def test_messages_are_warnings_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = AppendedFile(tmp_path / "log")
    with no_file_beyond(0):
        file.append(b"one\n")
    file.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.startswith(f"warning: {tmp_path / 'log'} ") for line in shown.err.splitlines()] == [True, True]
