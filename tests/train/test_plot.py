"""The loss figure."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from steptron.errors import UserError
from steptron.train.plot import plot_losses, smooth
from steptron.train.records import Record, ValidationRecord
from steptron.train.sinks import JsonlSink
from tests.train.test_records import step_record, write_all


def test_smooth_is_a_centred_mean_that_shrinks_at_the_start() -> None:
    assert smooth([9.0, 6.0, 3.0, 3.0, 1.0, 8.0], half_width=2).tolist() == [
        9.0,
        (9 + 6 + 3) / 3,
        (9 + 6 + 3 + 3 + 1) / 5,
        (6 + 3 + 3 + 1 + 8) / 5,
        (3 + 3 + 1 + 8) / 4,
        (3 + 1 + 8) / 3,
    ]


def test_smoothing_does_not_shift_a_slope() -> None:
    slope = [float(value) for value in range(40)]
    np.testing.assert_allclose(smooth(slope, half_width=3)[:-3], slope[:-3], rtol=1e-12)


def test_smooth_leaves_out_what_is_not_finite() -> None:
    smoothed = smooth([math.nan, 4.0, math.inf, 2.0, math.nan], half_width=1)
    assert math.isnan(smoothed[0])
    assert smoothed[1:].tolist() == [4.0, 3.0, 2.0, 2.0]


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def test_a_run_with_gaps_is_drawn(tmp_path: Path) -> None:
    records: list[Record] = []
    for step in range(1, 61):
        mtp = (8 / step,) if step < 30 else (8 / step, 9 / step)
        records.append(step_record(step, lm_loss=math.nan if step == 20 else 7 / step, mtp_losses=mtp))
        if step % 20 == 0:
            records.append(ValidationRecord(step=step, lm_loss=7 / step, mtp_losses=(8 / step,)))
    write_all(tmp_path / "log.jsonl", 0, records)
    plot_losses(tmp_path / "log.jsonl", tmp_path / "plots" / "loss.png", {"unigram entropy": 5.9})
    assert png_size(tmp_path / "plots" / "loss.png") == (1170, 910)


def test_drawing_needs_neither_display_nor_pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    write_all(tmp_path / "log.jsonl", 0, [step_record(1, mtp_losses=())])
    plot_losses(tmp_path / "log.jsonl", tmp_path / "loss.png")
    assert png_size(tmp_path / "loss.png") == (1170, 910)


def test_a_log_without_steps_is_refused(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "log.jsonl", 0).close()
    with pytest.raises(UserError, match="no training step"):
        plot_losses(tmp_path / "log.jsonl", tmp_path / "loss.png")
