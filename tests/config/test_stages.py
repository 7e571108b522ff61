"""Stages against a run that is walked through step by step, and formulas written out a second time."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from steptron.config.batch_schedule import BatchSchedule
from steptron.config.checks import check_stages
from steptron.config.loader import Loaded, load
from steptron.config.show import render, render_json
from steptron.errors import ConfigError, UserError
from steptron.optim.schedule import bias_update_rate, learning_rate
from tests.config.samples import MINIMAL, write

STEPLESS = MINIMAL.replace("  steps: 10\n", "")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def staged(stages: list[dict[str, Any]], *overrides: str, base: str = STEPLESS) -> Loaded:
    return load(write(Path(), "run.yaml", base + "stages: " + json.dumps(stages)), overrides)


def some_stage(rng: random.Random, number: int) -> dict[str, Any]:
    batch = rng.choice([2, 4, 8])
    train: dict[str, Any] = {"global_batch_size": batch, "micro_batch_size": rng.choice([1, 2])}
    if batch > 2 and rng.random() < 0.5:
        train["batch_ramp"] = {"start": 2, "increment": 2, "sequences": rng.randrange(1, 60)}
    lr = rng.choice([1e-3, 3e-4])
    schedule: dict[str, Any] = rng.choice(
        [{"kind": "constant"}, {"kind": "cosine", "min_lr": lr / 5}, {"kind": "cosine", "min_lr": 0.0}]
    )
    if rng.random() < 0.5:
        schedule = schedule | {"warmup_fraction": rng.choice([0.03, 0.3, 0.5])}
    bias = rng.choice([{"rate": 1e-3}, {"rate": 1e-3, "final_rate": 0.0}, {"rate": 0.0, "final_rate": 2e-3}])
    return {
        "name": f"s{number}",
        "tokens": rng.randrange(1, 20_000),
        "data": {"sequence_length": rng.choice([16, 32, 128])},
        "train": train,
        "optimizer": {"lr": lr, "weight_decay": rng.choice([0.0, 0.1]), "schedule": schedule},
        "balance": {"bias": bias, "ep_loss_coefficient": rng.choice([0.0, 1e-3])},
        "model": {"full": {"rope": {"theta": rng.choice([1e4, 1e6])}}},
    }


def walk(stages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every step of the run, by taking one after the other."""
    steps: list[dict[str, Any]] = []
    sequences = tokens = 0
    for number, stage in enumerate(stages):
        first, own, length, train = len(steps), 0, stage["data"]["sequence_length"], stage["train"]
        while own * length < stage["tokens"]:
            size, ramp = train["global_batch_size"], train.get("batch_ramp")
            if ramp and own < ramp["sequences"]:
                sizes = range(ramp["start"], size + 1, ramp["increment"])
                size = sizes[own * (len(sizes) - 1) // ramp["sequences"]]
            step = {"stage": number, "batch": size, "consumed": sequences, "token": tokens, "index": len(steps) - first}
            steps.append(step | {"length": length})
            own, sequences, tokens = own + size, sequences + size, tokens + size * length
        count = len(steps) - first
        for step in steps[first:]:
            step["lr"] = rate_of(stage["optimizer"], step["index"], count)
            bias = stage["balance"]["bias"]
            end = bias.get("final_rate", bias["rate"])
            step["bias"] = bias["rate"] + (end - bias["rate"]) * step["index"] / count
    return steps


def rate_of(optimizer: dict[str, Any], index: int, count: int) -> float:
    schedule, lr = optimizer["schedule"], float(optimizer["lr"])
    warmup = round(schedule.get("warmup_fraction", 0) * count)
    if index < warmup:
        return lr * index / warmup
    if schedule["kind"] == "constant":
        return lr
    way = (index - warmup) / (count - warmup)
    return float(schedule["min_lr"] + (lr - schedule["min_lr"]) * (1 + math.cos(math.pi * way)) / 2)


@pytest.mark.parametrize("seed", range(60))
def test_every_step_is_in_the_stage_and_has_what_the_walk_says(seed: int) -> None:
    rng = random.Random(seed)
    stages = [some_stage(rng, number) for number in range(rng.randrange(1, 6))]
    curriculum = staged(stages).curriculum
    steps = walk(stages)
    assert curriculum.steps == len(steps)
    assert curriculum.sequences == steps[-1]["consumed"] + steps[-1]["batch"]
    for done, step in enumerate(steps):
        stage = curriculum.after(done)
        config, index = stage.config, done - stage.first_step
        assert (stage.number, index) == (step["stage"], step["index"])
        assert stage.consumed_before(done) == step["consumed"]
        assert config.data.sequence_length == step["length"]
        own = step["consumed"] - stage.first_sequence
        assert BatchSchedule(config.train).global_batch_size(own) == step["batch"]
        assert learning_rate(config.optimizer, index, config.train.steps) == pytest.approx(step["lr"], rel=1e-13)
        rate = bias_update_rate(config.balance.bias, index, config.train.steps)
        assert rate == pytest.approx(step["bias"], rel=1e-13, abs=1e-18)
        given = stages[stage.number]
        assert config.optimizer.weight_decay == given["optimizer"]["weight_decay"]
        assert config.balance.ep_loss_coefficient == given["balance"]["ep_loss_coefficient"]
        assert config.model.full.rope.theta == given["model"]["full"]["rope"]["theta"]
        # The step before a border belongs to the stage that ends there.
        assert curriculum.before(done + 1) is stage
    for stage in curriculum.stages:
        first = next(step for step in steps if step["stage"] == stage.number)
        assert stage.first_token == first["token"]
        budget = stages[stage.number]["tokens"]
        assert budget <= stage.consumed_tokens
        last = [step for step in steps if step["stage"] == stage.number][-1]
        assert stage.consumed_tokens - last["batch"] * last["length"] < budget, "one step less is not enough"


def test_a_run_without_stages_is_one(tmp_path: Path) -> None:
    curriculum = load(write(Path(), "run.yaml", MINIMAL)).curriculum
    assert not curriculum.is_staged and curriculum.steps == 10 and len(curriculum.stages) == 1
    assert curriculum.after(0) is curriculum.after(10) is curriculum.before(10) is curriculum.stages[0]


TWO: list[dict[str, Any]] = [
    {"name": "short", "tokens": 1000},
    {"name": "long", "tokens": 2000, "data": {"sequence_length": 64}, "model": {"full": {"rope": {"theta": 1e6}}}},
]


def test_what_is_shown_loads_back() -> None:
    scaling = {"factor": 2.0, "original_length": 64}
    stages = [*TWO, {"name": "last", "tokens": 5, "model": {"full": {"rope": {"theta": 5e6, "scaling": scaling}}}}]
    loaded = staged(stages)
    again = load(write(Path(), "shown.yaml", render(loaded)))
    assert again.curriculum == loaded.curriculum
    shown = json.loads(render_json(loaded))["stages"]
    assert [stage["name"] for stage in shown] == ["short", "long", "last"]
    assert [stage["config"]["data"]["sequence_length"] for stage in shown] == [32, 64, 32]
    assert shown[1]["sources"]["data.sequence_length"]["file"] == "run.yaml"


def test_overrides_reach_into_stages() -> None:
    loaded = staged(TWO, "stages.1.tokens=64", "stages.1.train.global_batch_size=2", "data.seed=7")
    assert [stage.config.train.steps for stage in loaded.curriculum.stages] == [8, 1]
    assert {stage.config.data.seed for stage in loaded.curriculum.stages} == {7}


@pytest.mark.parametrize(
    ("stages", "overrides", "said"),
    [
        ([], [], "stages takes a list of stages"),
        ([{"tokens": 5}], [], "stages.0.name is missing"),
        ([{"name": "a"}], [], "stages.0 takes either tokens or epochs as its budget [run.yaml:"),
        ([{"name": "a", "tokens": 0}], [], "stages.0.tokens"),
        ([{"name": "a", "tokens": 5, "epochs": 1}], [], "stages.0 takes either tokens or epochs"),
        ([{"name": "a", "epochs": 0}], [], "stages.0.epochs"),
        ([{"name": "a", "epochs": 2}], [], "stages.0.epochs: an epoch cannot be counted: "),
        ([{"name": "a", "tokens": 5, "token": 6}], [], "stages.0.token is not a known key; did you mean tokens"),
        ([{"name": "a", "tokens": 5, "data": {"sequence_lenght": 6}}], [], "did you mean data.sequence_length"),
        ([3], [], "stages.0 takes name, tokens and settings"),
        ([{"name": "a", "tokens": 5}], ["train.steps=3"], "a run with stages ends with the tokens of the last one"),
        ([*TWO, TWO[0]], [], "stages.2.name: short is the name of stages.0 already"),
        (
            [TWO[0], {"name": "b", "tokens": 5, "model": {"num_layers": 6}}],
            [],
            "model.num_layers is 6, but 5 in",
        ),
        ([TWO[0], {"name": "b", "tokens": 5, "train": {"output": "x"}}], [], "train.output is x, but runs/out"),
        ([TWO[0], {"name": "b", "tokens": 5, "train": {"seed": 2}}], [], "train.seed is 2"),
        ([{"name": "a", "tokens": 2**62}], [], "the run would have more than 2^31 - 1 steps"),
    ],
)
def test_what_is_wrong_with_stages_is_said(stages: list[Any], overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s).*") as raised:
        staged(stages, *overrides)
    assert said in str(raised.value)


def test_each_stage_is_checked_and_named() -> None:
    stages = [TWO[0], {"name": "b", "tokens": 500, "train": {"global_batch_size": 3}}]
    with pytest.raises(ConfigError, match=r"stage b: train\.global_batch_size"):
        check_stages(staged(stages).curriculum, 1, "cpu")
    with pytest.raises(ConfigError, match=r"stages.0.clone_mtp copies MTP depth 1"):
        check_stages(staged([TWO[0] | {"clone_mtp": True}]).curriculum, 1, "cpu")


def test_a_stage_is_found_by_its_name() -> None:
    loaded = staged(TWO)
    assert loaded.stage("long").number == 1 and loaded.stage(None).number == 0
    with pytest.raises(UserError, match="no stage is named 'short2'; there are short, long"):
        loaded.stage("short2")
