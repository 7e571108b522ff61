"""Lines for whoever watches, where they cannot be shown."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from steptron.train.messages import say, warn
from tests.train.full_disk import no_file_beyond


def test_lines_go_where_they_belong(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    warn("beware")
    assert capsys.readouterr() == ("hello\n", "warning: beware\n")


def test_what_a_full_disk_refuses_is_shown_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", out)
        with no_file_beyond(0):
            say("hello")
            warn("beware")
        say("again")
    assert (tmp_path / "out").read_text() == "hello\nwarning: beware\nagain\n"


def test_a_closed_pipe_ends_no_run() -> None:
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError), os.fdopen(write, "w") as pipe:
        say("hello", pipe)
        say("again", pipe)
        pipe.flush()
