"""What a run shows of its optimizer, and that a resumed run goes on with it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import torch

from steptron.config.checks import check
from steptron.config.loader import load
from steptron.parallel.mesh import build_mesh
from steptron.train.loop import Pretraining
from steptron.train.records import read_records
from steptron.train.run_lock import run_lock_of_all
from steptron.train.stop import StopRequest
from tests.end_to_end.runs import REPOSITORY, pretrain_arguments
from tests.worker_pool import WorkerPool

OPTIONS = (
    "optimizer.name=muon",
    "optimizer.muon.diagnostics={every_steps: 2, sample: 3}",
    "optimizer.weight_clipping.threshold=0.3",
    "train.checkpoint.every_steps=2",
)


def pretrain(rank: int, world_size: int, data: str, output: str, steps: int, fresh: bool = False) -> str:
    """What a run prints."""
    _, file, *overrides = pretrain_arguments(Path(data), Path(output), steps, *OPTIONS)
    curriculum = load(REPOSITORY / file, overrides).curriculum
    config = curriculum.stages[0].config
    check(config, world_size, check_data=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), run_lock_of_all(config.train.output):
        Pretraining(curriculum, build_mesh(config.parallel), torch.device("cpu"), fresh=fresh).run(StopRequest())
    return printed.getvalue()


def records(output: Path, rank: int) -> list[dict[str, list[object]]]:
    return [json.loads(line) for line in (output / "muon" / f"rank-{rank:05}.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[tuple[int, str, float]]:
    """Validations of the shorter runs left out."""
    found = [(record.step, record.kind, record.lm_loss) for record in read_records(output / "log.jsonl")]
    return [item for item in found if item[1] == "train" or item[0] == 4]


def test_table_diagnostics_and_clipping_of_a_run_that_resumes(data: Path, pool: WorkerPool, tmp_path: Path) -> None:
    through, parts = tmp_path / "through", tmp_path / "parts"
    shown, other = pool.run(2, pretrain, str(data), str(through), 4)
    assert other == ""
    lines = shown.splitlines()
    # The table comes before the run starts, and is short.
    assert lines[0].split() == ["updated", "by", "role", "matrices", "shapes", "decay", "lr", "x"]
    (end,) = (number for number, line in enumerate(lines) if "parameters.tsv" in line)
    assert end < 25 and end < min(number for number, line in enumerate(lines) if line.startswith("model "))
    assert len((through / "parameters.tsv").read_text().splitlines()) > 200
    clipped = [line for line in lines if "weight clipping" in line]
    assert [line.partition(":")[0] for line in clipped] == ["step 2", "step 4"]
    for steps in (2, 4):
        again, _ = pool.run(2, pretrain, str(data), str(parts), steps)
        assert [line for line in again.splitlines() if "weight clipping" in line] == [clipped[steps // 2 - 1]]
    for rank in (0, 1):
        expected = records(through, rank)
        assert [record["step"] for record in expected] == [2, 4]
        assert records(parts, rank) == expected
    assert losses(parts) == losses(through)  # the last one is a validation, after the last clipping
    pool.run(2, pretrain, str(data), str(parts), 2, True)
    assert [record["step"] for record in records(parts, 1)] == [2]
