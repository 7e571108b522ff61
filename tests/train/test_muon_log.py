"""The files of Muon's diagnostics: what a line holds, and what is left of them when a run resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from steptron.errors import UserError
from steptron.optim.diagnostics import MatrixDiagnostics
from steptron.train.muon_log import MuonLog
from tests.train.full_disk import no_file_beyond


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(output: Path, rank: int, world_size: int, steps: range, resume_step: int = 0) -> Path:
    log = MuonLog(output, rank, world_size, resume_step)
    for step in steps:
        log.write(step, [MatrixDiagnostics("a", float(step), 0.2, 1.0, None, None)])
    log.close()
    return output / "muon" / f"rank-{rank:05}.jsonl"


def test_a_line_has_a_list_for_every_figure(tmp_path: Path) -> None:
    log = MuonLog(tmp_path, 3, 4, 0)
    good = MatrixDiagnostics("layers.1.ffn.experts.up.weight[2]", 2.5, 0.2, 7.0, 0.01, 3.5)
    bad = MatrixDiagnostics("head_gate", math.nan, math.nan, math.inf, None, None)
    log.write(12, [good, bad])
    log.write(14, [])  # a rank may own no matrix
    assert lines(tmp_path / "muon" / "rank-00003.jsonl") == [
        {
            "step": 12,
            "matrix": ["layers.1.ffn.experts.up.weight[2]", "head_gate"],
            "largest": [2.5, "NaN"],
            "update_rms": [0.2, "NaN"],
            "momentum_norm": [7.0, "Infinity"],
            "orthogonality_error": [0.01, None],
            "stable_rank": [3.5, None],
        },
        {
            "step": 14,
            "matrix": [],
            "largest": [],
            "update_rms": [],
            "momentum_norm": [],
            "orthogonality_error": [],
            "stable_rank": [],
        },
    ]
    log.close()


def test_a_resumed_run_goes_on_without_steps_twice(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 2, range(1, 6))
    with path.open("a") as stream:
        stream.write('{"step": 6, "mat')  # the run died here
    other = write(tmp_path, 1, 2, range(1, 6))
    write(tmp_path, 0, 2, range(4, 8), resume_step=3)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines(other)] == [1, 2, 3, 4, 5]  # its own rank's to cut back


def test_files_of_ranks_that_are_no_more_are_cut_back_by_the_first(tmp_path: Path) -> None:
    paths = [write(tmp_path, rank, 3, range(1, 6)) for rank in range(3)]
    write(tmp_path, 1, 2, range(0), resume_step=3)
    assert [line["step"] for line in lines(paths[2])] == [1, 2, 3, 4, 5]
    write(tmp_path, 0, 2, range(0), resume_step=3)
    assert all([line["step"] for line in lines(path)] == [1, 2, 3] for path in paths)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 0, 1, range(0))
    path.write_text("not ours\nat all\n")
    with pytest.raises(UserError, match=r"rank-00000\.jsonl:1: not a record of a run"):
        MuonLog(tmp_path, 0, 1, 0)
    assert path.read_text() == "not ours\nat all\n"


def test_a_full_disk_ends_no_run_and_loses_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "muon" / "rank-00000.jsonl"
    with MuonLog(tmp_path, 0, 1, 0) as log:
        log.write(1, [])
        with no_file_beyond(path.stat().st_size + 10):
            log.write(2, [])
            log.write(3, [])
            assert [line["step"] for line in lines(path)] == [1]
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_records_that_are_lost_are_an_error_unless_there_is_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = f"{tmp_path / 'muon' / 'rank-00000.jsonl'} cannot be written (File too large): 1 record is lost"
    with no_file_beyond(0), pytest.raises(UserError) as error, MuonLog(tmp_path, 0, 1, 0) as log:
        log.write(1, [])
    assert str(error.value) == lost
    with (
        no_file_beyond(0),
        pytest.raises(ZeroDivisionError, match="the reason"),
        MuonLog(tmp_path, 0, 1, 0) as log,
    ):
        log.write(1, [])
        raise ZeroDivisionError("the reason")
    assert f"warning: {lost}" in capsys.readouterr().err.splitlines()
