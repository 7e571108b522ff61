"""What may change between a checkpoint and the run that goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron.checkpoint.manifest import Manifest, Progress
from steptron.checkpoint.resume import changes
from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.errors import UserError
from tests.parallel.layouts import NANO

MANIFEST = Manifest(
    written_at="2026-01-01T00:00:00+00:00",
    steptron_version="0",
    torch_version="0",
    megatron_version="0",
    processes=1,
    files={},
    progress=Progress(),
    optimizer_steps=0,
    datasets=["a", "b"],
)


def configuration(*overrides: str) -> PretrainConfig:
    return load(NANO, overrides).config


@pytest.mark.parametrize(
    "override, line",
    [
        ("model.moe.top_k=3", "model.moe.top_k: 2 before, 3 now"),
        ("model.norm_eps=0.1", "model.norm_eps: 1e-05 before, 0.1 now"),
        ("model.sliding.window=8", "model.sliding.window: 16 before, 8 now"),
        ("model.clamp.position=before_silu", "model.clamp.position: after_silu before, before_silu now"),
        ("model.clamp.routed={7: 1.0}", "model.clamp.routed.8: 1.0 before, None now"),
        ("train.precision=bf16", "train.precision: fp32 before, bf16 now"),
    ],
)
def test_what_gives_the_state_another_meaning_is_refused_by_name(override: str, line: str) -> None:
    with pytest.raises(
        UserError, match=r"set them back, give another train\.output, or start over with --fresh"
    ) as error:
        changes(configuration(), configuration(override), MANIFEST, ["a", "b"])
    assert f"  - {line}" in str(error.value).splitlines()


@pytest.mark.parametrize(
    "before, now, line",
    [
        (["optimizer.name=adamw"], ["optimizer.name=sgd"], "optimizer.name: adamw before, sgd now"),
        (["optimizer.name=muon"], ["optimizer.name=adamw"], "optimizer.name: muon before, adamw now"),
        (["optimizer.name=sgd"], ["optimizer.name=muon"], "optimizer.name: sgd before, muon now"),
        (
            ["optimizer.name=muon"],
            ["optimizer.name=muon", "optimizer.roles={router: {optimizer: muon}}"],
            "optimizer.roles.router.optimizer: adamw before, muon now",
        ),
        (
            ["optimizer.name=muon", "optimizer.roles={expert_down: {optimizer: adamw}, router: {optimizer: muon}}"],
            ["optimizer.name=muon", "optimizer.roles={router: {optimizer: muon}}"],
            "optimizer.roles.expert_down.optimizer: adamw before, muon now",
        ),
    ],
)
def test_another_algorithm_is_refused_by_name(before: list[str], now: list[str], line: str) -> None:
    with pytest.raises(UserError, match="under which its state has another meaning") as error:
        changes(configuration(*before), configuration(*now), MANIFEST, ["a", "b"])
    assert [text for text in str(error.value).splitlines() if text.startswith("  - ")] == [f"  - {line}"]


def test_what_uses_the_state_otherwise_is_noted() -> None:
    """Muon's rule, the pace of a role and who owns what; a role's default algorithm by name; AdamW for roles that the
    model does not have."""
    noted = changes(
        configuration("optimizer.name=muon"),
        configuration(
            "optimizer.name=muon",
            "optimizer.muon={momentum: 0.9, nesterov: false, steps: 5, precision: bf16, scale: spectral}",
            "optimizer.roles={router: {optimizer: adamw}, query: {lr_multiplier: 0.5}, shared_up: {optimizer: muon}}",
            "optimizer.sharding={reduction: all_reduce, overlap_gather: false}",
        ),
        MANIFEST,
        ["a", "b"],
    )
    assert noted == [
        "optimizer.muon.momentum: 0.95 before, 0.9 now",
        "optimizer.muon.nesterov: True before, False now",
        "optimizer.muon.precision: fp16 before, bf16 now",
        "optimizer.muon.scale: match_rms_adamw before, spectral now",
        "optimizer.muon.steps: 6 before, 5 now",
        "optimizer.roles.query.lr_multiplier: 1.0 before, 0.5 now",
        "optimizer.roles.router.optimizer: None before, adamw now",
        "optimizer.roles.shared_up.optimizer: None before, muon now",
        "optimizer.sharding.reduction: auto before, all_reduce now",
    ]


def test_other_changes_are_noted_and_free_ones_are_not() -> None:
    noted = changes(
        configuration(),
        configuration(
            "data.seed=7",
            "optimizer.lr=1e-3",
            "train.steps=200",
            "train.output=x",
            "train.threads=1",
            "data.index_cache=y",
        ),
        MANIFEST,
        ["a", "c"],
    )
    assert noted == [
        "data.seed: 1234 before, 7 now",
        "optimizer.lr: 0.002 before, 0.001 now",
        "train.steps: 100 before, 200 now",
        "data.train.1: the dataset has other content",
    ]
    assert changes(configuration(), configuration(), MANIFEST, ["a", "b"]) == []


def test_the_configuration_in_a_checkpoint_equals_the_run(tmp_path: Path) -> None:
    """No difference is found where there is none, after writing and reading."""
    from steptron.config.show import to_yaml

    config = configuration("model.clamp.routed={7: 1.0, 8: 2.5}", "optimizer.lr=1e-3")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert changes(load(tmp_path / "config.yaml").config, config, MANIFEST, ["a", "b"]) == []
