"""`steptron plan`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from steptron.cli.main import app
from tests.config.samples import write

CONFIGS = Path(__file__).parents[2] / "configs"
FLASH = CONFIGS / "pretrain" / "step3p5-flash.yaml"
NANO = CONFIGS / "pretrain" / "nano.yaml"


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def line(output: str, start: str) -> list[str]:
    """The words of the line that begins so."""
    (found,) = (line.split() for line in output.splitlines() if line.strip().startswith(start))
    return found


def test_a_layout_of_4096_ranks() -> None:
    result = plan(FLASH, "--world-size", "4096")
    assert result.exit_code == 0, result.output
    assert (
        "4,096 ranks: pipeline 8 x 2 chunks; attention and dense layers tensor 1 x context 1 x data 512"
        in result.output
    )
    assert "32 micro-batches of 1 per rank; bf16, muon" in result.output
    assert "embedding, layers full dense 0; sliding dense 1-2    1,237,869,312" in result.output
    assert "3 MTP (2 idle), heads" in result.output
    assert "with equal stages 9.9%" in result.output  # 7 / (2 x 32 + 7)


def test_the_fewest_processes_by_default() -> None:
    result = plan(FLASH)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("64 ranks: ")
    assert plan(NANO).output.startswith("1 rank: pipeline 1; ")


def test_a_rank(tmp_path: Path) -> None:
    file = tmp_path / "rank.json"
    result = plan(FLASH, "--world-size", "4096", "--rank", "511", "--json", file)
    assert result.exit_code == 0, result.output
    assert "Rank 511: pipeline 0; tensor 0, context 0, data 511; expert 7, expert-data 63" in result.output
    assert line(result.output, "expert-data ") == ["expert-data", "64:", "7", "to", "511", "by", "8"]
    assert "chunk 1, stage 8: layers sliding MoE 21-22" in result.output
    experts = line(result.output, "1       layers.21-22.ffn.experts.down_projection ")
    assert " ".join(experts[2:]) == "36 x 4096 x 1280 288 x 4096 x 1280 188,743,680 each 64: 7 to 511 by 8"
    assert "Padding: tokens per sequence 0, rows of the vocabulary on the last tensor-parallel rank 0" in result.output
    content = json.loads(file.read_text())
    assert content["coordinates"]["data"] == 511
    parameters = {parameter["name"]: parameter for parameter in content["parameters"]}
    assert parameters["embedding.weight"]["owners"] == list(range(512))
    assert sum(size_of(parameter["shape"]) for parameter in parameters.values()) == 2_623_055_680


def test_a_rank_of_nodes() -> None:
    result = plan(FLASH, "parallel.node_size=8", "--world-size", "4096", "--rank", "511")
    assert result.exit_code == 0, result.output
    assert "512: 0 to 511 8: 504 to 511 64: 7 to 511 by 8" in " ".join(result.output.split())
    assert "dp_cp.inter" in result.output


def size_of(shape: list[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def test_json_of_a_layout(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    result = plan(NANO, "parallel.pipeline=2", "parallel.expert=2", "--json", file)
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert content["layout"]["world_size"] == 4
    assert [stage["pipeline_rank"] for stage in content["stages"]] == [0, 1]
    assert sum(stage["flops_share"] for stage in content["stages"]) == pytest.approx(1)
    (first, second) = content["pipeline_ranks"]
    memory = first["memory"]
    assert memory["peak"] == pytest.approx(memory["fixed"] + sum(memory["activations"].values()) + memory["transient"])
    assert {(entry["group"], entry["kind"]) for entry in second["communication"]} >= {("ep", "all_to_all")}


@pytest.mark.parametrize(("limit", "code", "verdict"), [("1", 0, "fits"), ("0.01", 1, "does not fit")])
def test_a_limit_of_memory(limit: str, code: int, verdict: str) -> None:
    result = plan(NANO, "--memory", limit)
    assert result.exit_code == code
    assert result.output.rstrip().endswith(f"GiB of {limit}: {verdict}")
    assert plan(NANO, "--rank", "0", "--memory", limit).exit_code == code


def test_recomputation_needs_less_memory() -> None:
    def peak(*overrides: str) -> float:
        result = plan(FLASH, *overrides)
        assert result.exit_code == 0, result.output
        return float(line(result.output, "fullest: ")[-2])

    assert peak("train.recompute=[{parts: [attention, ffn]}]") < peak("train.recompute=[{parts: [norm]}]") < peak()


def test_what_other_machines_have_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a GPU, nor packages, data or a writable folder are needed to plan."""
    monkeypatch.setattr("steptron.config.checks._installed", lambda package: False)
    blocked = write(tmp_path, "file", "")
    result = plan(
        FLASH,
        f"train.output={blocked}/run",
        "train.device=cuda",
        "train.logging.wandb_project=flash",
        "parallel.dispatcher=flex",
    )
    assert result.exit_code == 0, result.output
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", "64"], "--rank 64: the layout has 64 processes here, numbered 0 to 63"),
        (["--world-size", "100"], "the number of processes (100) must be a multiple of parallel.pipeline x tensor x"),
        (["parallel.tensor=3"], "parallel.tensor can be"),
        (
            ["train.global_batch_size=4097", "stages.0.train.batch_ramp=null"],
            "train.global_batch_size (4097) must be a multiple",
        ),
        (["parallel.pipeline_layout=Ett|tt"], "parallel.pipeline_layout"),
        (["data.sequence_length=4090", "parallel.context=8"], "data.sequence_length (4090) must be a multiple of"),
    ],
)
def test_what_cannot_be_planned(arguments: list[str], message: str) -> None:
    result = plan(FLASH, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_json_that_cannot_be_written(tmp_path: Path) -> None:
    result = plan(NANO, "--json", tmp_path / "nowhere" / "plan.json")
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.stderr


def test_sequences_are_shared_in_the_unit_that_the_checks_ask_for() -> None:
    result = plan(NANO, "parallel.tensor=2", "parallel.context=2", "data.sequence_length=12", "--rank", "3")
    assert result.exit_code == 0, result.output
    assert "units of 4 tokens. Padding: tokens per sequence 0" in result.output


def test_a_rank_with_deep_ep_is_built_where_it_is_not_installed() -> None:
    flex = ["parallel.expert=2", "parallel.dispatcher=flex", "train.precision=bf16"]
    result = plan(NANO, *flex, "--device", "cuda", "--rank", "1")
    assert result.exit_code == 0, result.output
    assert "experts expert 2" in result.output
