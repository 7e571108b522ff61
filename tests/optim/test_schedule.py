"""Learning-rate and bias-update schedules against direct formulas and Megatron-Core's scheduler."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from steptron.config.schema import BiasScheduleConfig, OptimizerConfig
from steptron.optim.schedule import bias_update_rate, learning_rate


def optimizer(lr: float = 2.5e-4, **schedule: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, schedule=schedule)


def megatron_rates(style: str, lr: float, min_lr: float, warmup: int, total: int, steps: int) -> list[float]:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group: dict[str, Any] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=total,
        lr_decay_style=style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=total,
        wd_incr_style="constant",
    )
    rates = []
    for _ in range(steps):
        rates.append(group["lr"])
        scheduler.step(1)
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_equals_megatron_step_by_step(kind: str, warmup: int) -> None:
    config = optimizer(3e-4, kind=kind, warmup_steps=warmup, min_lr=5e-5)
    expected = megatron_rates(kind, 3e-4, 5e-5, warmup, total=40, steps=45)
    assert [learning_rate(config, step, 40) for step in range(45)] == pytest.approx(expected, rel=1e-14, abs=0)


def test_stage_1_of_the_report() -> None:
    """LR 0 to 2.5e-4 over 2,000 steps, cosine to 5e-5."""
    config, total = optimizer(kind="cosine", warmup_steps=2000, min_lr=5e-5), 300_000
    assert learning_rate(config, 0, total) == 0.0
    assert learning_rate(config, 1, total) == 2.5e-4 / 2000
    assert learning_rate(config, 1000, total) == 1.25e-4
    assert learning_rate(config, 2000, total) == 2.5e-4
    middle = 2000 + (total - 2000) // 2
    assert learning_rate(config, middle, total) == pytest.approx(1.5e-4, rel=1e-14)
    quarter = 2000 + (total - 2000) // 4
    assert learning_rate(config, quarter, total) == pytest.approx(5e-5 + 2e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-14)
    assert learning_rate(config, total - 1, total) > 5e-5
    assert learning_rate(config, total, total) == 5e-5
    assert learning_rate(config, total + 1000, total) == 5e-5


def staged() -> OptimizerConfig:
    """Stages like the report's: cosine down, on at that rate, linear down, then a higher constant rate."""
    return optimizer(
        2.5e-4,
        kind="staged",
        warmup_steps=10,
        segments=[
            {"steps": 100, "kind": "cosine", "end_lr": 5e-5},
            {"steps": 40, "kind": "linear", "end_lr": 2e-5},
            {"steps": 30, "kind": "constant", "end_lr": 2e-5},
            {"steps": 20, "kind": "constant", "end_lr": 3e-5},
            {"steps": 50, "kind": "cosine", "end_lr": 7.3e-6},
        ],
    )


def test_staged_segments_follow_their_formulas() -> None:
    expected = []
    for step in range(10 + 100 + 40 + 30 + 20 + 50 + 5):
        s = step - 10
        if step < 10:
            expected.append(2.5e-4 * step / 10)
        elif s < 100:
            expected.append(5e-5 + (2.5e-4 - 5e-5) * (1 + math.cos(math.pi * s / 100)) / 2)
        elif s < 140:
            expected.append(5e-5 - (5e-5 - 2e-5) * (s - 100) / 40)
        elif s < 170:
            expected.append(2e-5)
        elif s < 190:
            expected.append(3e-5)
        elif s < 240:
            expected.append(7.3e-6 + (3e-5 - 7.3e-6) * (1 + math.cos(math.pi * (s - 190) / 50)) / 2)
        else:
            expected.append(7.3e-6)
    rates = [learning_rate(staged(), step, 255) for step in range(255)]
    assert rates == pytest.approx(expected, rel=1e-14, abs=0)


def test_staged_borders_are_exact() -> None:
    rates = {step: learning_rate(staged(), step, 1000) for step in (10, 110, 150, 179, 180, 199, 200, 250, 999)}
    assert rates == {
        10: 2.5e-4, 110: 5e-5, 150: 2e-5, 179: 2e-5, 180: 3e-5, 199: 3e-5, 200: 3e-5, 250: 7.3e-6, 999: 7.3e-6,
    }  # fmt: skip


def test_a_staged_cosine_equals_the_plain_one() -> None:
    plain = optimizer(kind="cosine", warmup_steps=5, min_lr=2e-5)
    one_stage = optimizer(kind="staged", warmup_steps=5, segments=[{"steps": 45, "kind": "cosine", "end_lr": 2e-5}])
    for step in range(60):
        assert learning_rate(plain, step, 50) == learning_rate(one_stage, step, 50)


@pytest.mark.parametrize(
    ("config", "step", "message"),
    [
        (optimizer(), -1, "step must be 0 or more"),
        (
            optimizer(warmup_steps=100),
            0,
            r"optimizer.schedule.warmup_steps \(100\) must be less than train.steps \(100\)",
        ),
        (optimizer(min_lr=1.0), 0, r"optimizer.schedule.min_lr \(1.0\) must not exceed optimizer.lr \(0.00025\)"),
        (optimizer(kind="staged"), 0, "optimizer.schedule.segments is empty"),
    ],
)
def test_impossible_schedules_are_refused(config: OptimizerConfig, step: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learning_rate(config, step, 100)


def test_bias_rate_is_constant_without_a_decay() -> None:
    assert {bias_update_rate(BiasScheduleConfig(rate=1e-3), step, 1000) for step in (0, 1, 10**9)} == {1e-3}


def test_bias_rate_falls_linearly_to_zero() -> None:
    config = BiasScheduleConfig(rate=1e-3, decay_start_step=100, decay_steps=8)
    assert [bias_update_rate(config, step, 1000) for step in (0, 99, 100)] == [1e-3] * 3
    for step in range(100, 109):
        assert bias_update_rate(config, step, 1000) == pytest.approx(1e-3 * (108 - step) / 8, rel=1e-14, abs=0)
    assert bias_update_rate(config, 107, 1000) > 0.0
    assert bias_update_rate(config, 108, 1000) == bias_update_rate(config, 10**6, 1000) == 0.0


@pytest.mark.parametrize("field", ["decay_start_step", "decay_steps"])
def test_half_a_bias_decay_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=r"balance.bias.decay_start_step and balance.bias.decay_steps belong together"):
        bias_update_rate(BiasScheduleConfig(**{field: 3}), 0, 1000)
