"""Rates, MFU and expert loads in a record, against direct computations."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from steptron.checkpoint.manifest import Progress
from steptron.config.loader import load
from steptron.config.schema import PretrainConfig
from steptron.model.layer_spec import model_spec
from steptron.parallel.mesh import Mesh, build_mesh
from steptron.planning.flops import training_flops_per_token
from steptron.train import meter as meter_module
from steptron.train.losses import TokenCounts
from steptron.train.meter import Meter
from steptron.train.records import StepRecord
from steptron.train.step import Losses, Observation, StepResult
from tests.parallel.layouts import NANO
from tests.worker_pool import WorkerPool


def result(tokens: int, tokens_per_expert_LE: torch.Tensor) -> StepResult:
    observed = Observation(
        Losses(2.0, (3.0,), 1.1, 2.9),
        TokenCounts(tokens, (tokens, tokens), (tokens,)),
        tokens_per_expert_LE,
        0.4,
        stop_requested=False,
        all_written=False,
    )
    return StepResult(observed, 0.7)


def measure(rank: int, world_size: int) -> tuple[StepRecord, float]:
    config = load(NANO, ["parallel.expert=2", "train.peak_tflops=2.0"]).config
    mesh = build_mesh(config.parallel)
    clock = iter([100.0, 110.0, 110.0])
    with mock.patch.object(meter_module.time, "perf_counter", lambda: next(clock)):
        return record_of_two_steps(config, mesh)


def record_of_two_steps(config: PretrainConfig, mesh: Mesh) -> tuple[StepRecord, float]:
    meter = Meter(config, mesh, torch.device("cpu"))
    # Two layers of 8 experts: balanced, and the first group of 4 with all of it, one expert with half.
    loads_LE = torch.tensor([[10] * 8, [40, 20, 10, 10, 0, 0, 0, 0]])
    meter.count(result(300, loads_LE), data_seconds=1.0)
    meter.count(result(500, loads_LE), data_seconds=2.0)
    record = meter.record(Progress(2, 16, 800), result(500, loads_LE), batch_size=8, lr=0.1, bias_rate=0.2)
    flops = training_flops_per_token(model_spec(config.model), 128, 1).total
    return record, flops


def test_record_of_two_steps_in_ten_seconds(pool: WorkerPool) -> None:
    for record, flops in pool.run(2, measure):
        assert record.tokens_per_second == pytest.approx(80.0)
        assert record.step_seconds == pytest.approx(5.0)
        assert record.data_seconds == pytest.approx(1.5)
        assert record.model_tflops == pytest.approx(80.0 * flops / 2 / 1e12)
        assert record.mfu == pytest.approx(record.model_tflops / 2.0)
        assert record.max_violation == pytest.approx(((1 - 1) + (4 - 1)) / 2)
        assert record.min_load == 0.0
        assert record.straggler_factor == pytest.approx(2.0)
        assert record.routing_confidence == 0.4
        assert (record.loss, record.lm_loss, record.mtp_losses, record.ep_loss) == (2.9, 2.0, (3.0,), 1.1)
        assert (record.step, record.consumed_tokens, record.batch_size, record.grad_norm) == (2, 800, 8, 0.7)
        assert record.memory_bytes > 100 * 2**20
