"""What is measured when: defaults, what a configuration changes, and what it is refused."""

from __future__ import annotations

import pytest

from steptron.config.checks import check
from steptron.config.loader import load
from steptron.errors import ConfigError
from steptron.telemetry.quantities import DEFAULTS, Due, Quantity, resolve
from steptron_metrics import catalogue
from tests.parallel.layouts import NANO


def test_every_quantity_is_in_the_servers_catalogue() -> None:
    for name, quantity in DEFAULTS.items():
        metric = catalogue.find(name) or catalogue.find(f"{name}.expert_up")
        assert metric is not None, name
        assert (metric.cadence == "micro_batch") == (quantity.keep is not None), name


def test_roles_go_before_what_holds_for_all() -> None:
    quantities = resolve({"weight.norm": 4, "weight.norm.query": 3, "moe.tokens": 0}, {"moe.confidence": "folded"})
    assert quantities["moe.confidence"] == Quantity(1, "folded") and quantities["moe.tokens"] == Quantity(0, "folded")
    steps = {
        role: [s for s in range(1, 13) if Due(quantities, s).measures("weight.norm", role)]
        for role in ("query", "key", "embedding")
    }
    assert steps == {"query": [3, 6, 9, 12], "key": [4, 8, 12], "embedding": [10]}
    assert not Due(quantities, 4).measures("moe.tokens")
    assert not Due(quantities, 4).keeps_micro_batches("moe.confidence")


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(load(NANO, list(overrides)).config, 1)
    return str(error.value)


def test_unknown_names_and_addresses_are_refused_at_once() -> None:
    told = problems(
        "telemetry.every_steps={moe.token: 2, moe.tokens.query: 1, weight.norm.nobody: 3}",
        "telemetry.keep={weight.norm: folded, moe.nothing: folded}",
        "telemetry.server=localhost",
        "telemetry.certificate=/nowhere/ca.pem",
    )
    for part in (
        "telemetry.every_steps.moe.token: no such quantity; there are gradient.dot_weight, ",
        "telemetry.every_steps.moe.tokens.query: no such",
        "telemetry.every_steps.weight.norm.nobody: no such",
        "telemetry.keep.weight.norm: it is not measured in every micro-batch; those that are: moe.tokens, ",
        "telemetry.keep.moe.nothing: no such quantity",
        "telemetry.server (localhost) must be host:port, such as localhost:7077",
        "telemetry.certificate: there is no file /nowhere/ca.pem",
    ):
        assert part in told
    check(load(NANO, ["telemetry.server=localhost:7077", "telemetry.every_steps={update.norm.router: 5}"]).config, 1)


def test_without_grpc_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "grpc" else find(name))
    assert "pip install 'steptron[metrics]'" in problems("telemetry.server=localhost:7077")
