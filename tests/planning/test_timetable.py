"""The schedule of a run as a table and as a picture, and whether its stages fit a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron.config.loader import load
from steptron.errors import ConfigError
from steptron.planning.fitting import check_memory
from steptron.planning.memory import assume
from steptron.planning.plan import plan_layout
from steptron.planning.timetable import HEADINGS, plot, rows, table

CONFIGS = Path(__file__).parents[2] / "configs" / "pretrain"
FLASH = CONFIGS / "step3p5-flash.yaml"


def test_the_reports_schedule() -> None:
    """Section 3 and 4 of the report: what is published, in the units of the table."""
    found = [dict(zip(HEADINGS, row, strict=True)) for row in rows(load(FLASH).curriculum)]
    by_name = {row["stage"]: row for row in found}
    assert list(by_name) == ["base-4k", "anneal-4k", "anneal-32k", "mid-32k", "mid-128k", "mtp"]
    budgets = [14.6e12, 2e12, 1e12, 386e9, 364e9, 10e9]
    for row, budget in zip(found, budgets, strict=True):
        assert 0 <= int(row["tokens"].replace(",", "")) - budget < 67.2e6, "less than a batch beyond the budget"
    assert [row["length"] for row in found] == ["4,096"] * 2 + ["32,768"] * 2 + ["131,072"] * 2
    assert [row["batch"] for row in found[:3]] == ["4,096 to 16,384", "16,384", "2,048"]
    assert [row["learning rate"] for row in found[:5]] == [
        "0 to 0.00025 in 2,000, 0.00025 to 5e-05 (cosine)",
        "5e-05 to 2e-05 (cosine)",
        "2e-05",
        "0 to 2e-05 in 173, 2e-05",
        "2e-05 to 7.3e-06 (cosine)",
    ]
    assert [row["rope (full)"] for row in found] == ["10000", "10000", "1e+06", "1e+06", "5e+06", "5e+06"]
    assert [row["MTP"] for row in found] == ["0.3 x 1", *["0.1 x 1"] * 4, "0.1 x 3"]
    assert [row["EP loss"] for row in found] == ["0.001"] * 3 + ["0"] * 3
    assert [row["bias rate"] for row in found[3:]] == ["frozen"] * 3
    assert "0.21" in by_name["mid-32k"]["mixture"] and "0.0288" in by_name["mid-128k"]["mixture"]
    assert by_name["base-4k"]["metadata"] == "in loss for 3,800,000,000,000"
    assert [row["trains"] for row in found] == ["all"] * 3 + ["all but router"] * 2 + ["MTP"]
    assert {row["decay"] for row in found} == {"0.1"}


def test_columns_are_aligned_and_the_whole_is_added_up() -> None:
    curriculum = load(FLASH).curriculum
    lines = table(curriculum)
    start = lines[0].index("learning rate")
    assert all(line[start - 2 : start] == "  " and line[start] != " " for line in lines[1:-1])
    total = sum(stage.consumed_tokens for stage in curriculum.stages)
    assert lines[-1] == f"in all {total:,} tokens (padding counted) in {curriculum.steps:,} steps"


@pytest.mark.parametrize("name", ["step3p5-flash", "tiny-curriculum", "nano"])
def test_it_is_drawn(name: str, tmp_path: Path) -> None:
    plot(load(CONFIGS / f"{name}.yaml").curriculum, tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OSError, match="No such file"):
        plot(load(CONFIGS / f"{name}.yaml").curriculum, tmp_path / "none" / "schedule.png")


def test_stages_that_do_not_fit_are_named_with_a_remedy() -> None:
    curriculum = load(CONFIGS / "tiny-curriculum.yaml").curriculum
    config = curriculum.named("mid-long").config
    peak = plan_layout(config, 1, assume(config, "cpu")).fullest.memory.peak / 2**30
    check_memory(curriculum, 1, "cpu", 10 * peak)
    limit = round(0.95 * peak, 3)
    with pytest.raises(ConfigError) as raised:
        check_memory(curriculum, 1, "cpu", limit)
    long = next(problem for problem in raised.value.problems if problem.startswith("stage mid-long"))
    assert f"sequences of 1,024 tokens take {peak:.1f} GiB on the fullest rank, the device has {limit:g}" in long
    assert "parallel.context=2 would make it fit (on 2 processes" in long
    with pytest.raises(ConfigError, match="no context parallelism makes it fit"):
        check_memory(curriculum, 1, "cpu", 0.01)
