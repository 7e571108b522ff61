"""Held-out losses against those that a run has validated with, and against plain sums over documents."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from steptron.train.records import ValidationRecord, read_records
from tests.data.corpora import build_small, varied_texts
from tests.end_to_end.runs import steptron
from tests.train.test_fault_runs import pretrain
from tests.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("data")
    texts = [{"text": text} for text in varied_texts(300)]
    return [
        build_small(folder, name, part, validation_fraction=0.2)
        for name, part in (("one", texts[:150]), ("two", texts[150:]))
    ]


def test_what_a_run_validates_is_what_is_evaluated(pool: WorkerPool, domains: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "run"
    (outcome,) = pool.run(1, pretrain, domains[0], output, 3, ["train.validation.batches=100"])
    assert outcome.error == ""
    (validated,) = [record for record in read_records(output / "log.jsonl") if isinstance(record, ValidationRecord)]
    done = steptron("eval", str(output), *map(str, domains), "--json")
    one, two = json.loads(done.stdout)
    assert [one["dataset"], two["dataset"]] == list(map(str, domains))
    assert one["lm_loss"] == pytest.approx(validated.lm_loss, rel=1e-6)
    assert one["mtp_losses"] == pytest.approx(validated.mtp_losses, rel=1e-6)
    assert one["bits_per_byte"] == pytest.approx(validated.bits_per_byte, rel=1e-6)
    assert one["tokens"] > 100 and two["lm_loss"] != one["lm_loss"]
    # As many tokens as count, whatever the batches.
    again = json.loads(steptron("eval", str(output), str(domains[0]), "--json", "--batch-size", "3").stdout)
    assert again[0]["tokens"] == one["tokens"] and again[0]["lm_loss"] == pytest.approx(one["lm_loss"], rel=1e-6)
    few = json.loads(steptron("eval", str(output), str(domains[0]), "--json", "--max-sequences", "2").stdout)
    assert 0 < few[0]["tokens"] <= 64 < one["tokens"] and not math.isnan(few[0]["lm_loss"])
    table = steptron("eval", str(output), str(domains[1]), "--sequence-length", "16").stdout
    assert "bits per byte" in table and str(domains[1]) in table


def test_what_cannot_be_evaluated_is_said(domains: list[Path], tmp_path: Path) -> None:
    assert "none holds no weights" in steptron("eval", str(tmp_path / "none"), str(domains[0]), expect=2).stderr
