"""Logits of the tiny case under every kind of layout, against its right outputs and the float64 reference."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.inspection.runs import LAYOUTS, Arrays, case_ids, odd_ids, reference_logits, relative, run_logits, run_trace
from tests.model.reference import forward
from tests.model.released import config_json, expected, released_weights
from tests.worker_pool import WorkerPool

TOLERANCE = 1e-4


def largest(actual: Arrays, right: Arrays) -> dict[str, float]:
    assert actual.keys() == right.keys()
    for name, value in actual.items():
        assert value.dtype == np.float32 and value.shape == right[name].shape
    return {name: float(np.abs(value - right[name]).max()) for name, value in actual.items()}


@functools.cache
def odd_reference() -> Arrays:
    return reference_logits(odd_ids())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_right_outputs(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    first, *others = pool.run(world_size, run_logits, overrides, case_ids())
    right = expected()
    errors = largest(first, {name: right[name].numpy() for name in ("logits", "mtp_logits")})
    assert max(errors.values()) <= TOLERANCE, errors
    assert not any(others), "rank 0 alone has them"


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_and_lengths_that_do_not_divide(pool: WorkerPool, name: str) -> None:
    """Also at the end of the row, where MTP reads tokens that are not there."""
    world_size, overrides = LAYOUTS[name]
    first, *_ = pool.run(world_size, run_logits, overrides, odd_ids())
    errors = largest(first, odd_reference())
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", ["DP2", "CP2xTP2"])
def test_one_token(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    ids = case_ids()[:1, :1]
    first, *_ = pool.run(world_size, run_logits, overrides, ids)
    errors = largest(first, reference_logits(ids))
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("name", ["one process", "TP2", "CP2xTP2"])
def test_a_vocabulary_that_does_not_divide(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    weights = {
        name: (tensor[:123].clone() if tensor.shape[0] == 128 else tensor)
        for name, tensor in released_weights().items()
    }
    config = config_json() | {"vocab_size": 123}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    ids = case_ids() % 123
    world_size, overrides = LAYOUTS[name]
    first, *_ = pool.run(world_size, run_logits, overrides, ids, "fp32", None, tmp_path)
    main, mtp = forward({name: tensor.double() for name, tensor in weights.items()}, config, ids)
    errors = largest(first, {"logits": main.numpy(), "mtp_logits": mtp.numpy()})
    assert max(errors.values()) <= TOLERANCE, errors


def test_without_mtp(pool: WorkerPool) -> None:
    (result,) = pool.run(1, run_logits, ["model.mtp.depths=0"], case_ids())
    assert result["mtp_logits"].shape == (0, 2, 40, 128)
    assert np.abs(result["logits"] - expected()["logits"].numpy()).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("override", "changed", "least"),
    [
        ("model.sliding.window=7", ["logits", "mtp_logits"], 1.0),
        ("model.clamp.position=before_silu", ["logits", "mtp_logits"], 0.1),
        ("model.mtp.chain=post_norm", ["mtp_logits"], 1.0),
        ("model.mtp.head=shared", ["mtp_logits"], 1.0),
    ],
)
def test_options_that_the_record_leaves_open(pool: WorkerPool, override: str, changed: list[str], least: float) -> None:
    """They reach the model: what they change, and nothing else, is no longer the release's."""
    (result,) = pool.run(1, run_logits, [override], case_ids())
    errors = {name: float(np.abs(value - expected()[name].numpy()).max()) for name, value in result.items()}
    for name, error in errors.items():
        assert error > least if name in changed else error <= TOLERANCE, errors


def test_bf16_with_replayed_routing(pool: WorkerPool) -> None:
    """Rounding alone is left: 6 % of the logits' norm (tests/model/test_bf16_replay.py says why a free run differs)."""
    (exact,) = pool.run(1, run_trace, [], case_ids(), ["layers.*.router.experts"])
    experts = {int(name.split(".")[1]): torch.from_numpy(value) for name, value in exact.items()}
    right = expected()
    errors = {}
    for name, recorded in (("replayed", experts), ("free", None)):
        (result,) = pool.run(1, run_logits, [], case_ids(), "bf16", recorded)
        assert result["logits"].dtype == np.float32
        errors[name] = max(relative(result[key], right[key].numpy()) for key in result)
    assert errors["replayed"] <= 0.06 < errors["free"], errors
