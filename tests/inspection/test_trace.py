"""Traces under layouts against one process's, against transformers, and with replayed routing."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from steptron.checkpoint.weights import open_weights
from steptron.errors import ConfigError, UserError
from steptron.inspection.archive import INPUT_IDS, open_archive
from steptron.inspection.replay import read_routing, replay_routing
from steptron.inspection.sites import choose, sites
from steptron.inspection.transformers_trace import (
    load_transformers,
    trace_transformers,
    transformers_sites,
    without_mtp,
)
from steptron.model.layer_spec import model_spec
from tests.inspection.runs import (
    LAYOUTS,
    Arrays,
    case_ids,
    odd_ids,
    relative,
    run_logits,
    run_trace,
    shifted,
    write_trace,
)
from tests.model.helpers import build_model
from tests.model.released import CASE, expected, load_released, released_config, released_weights
from tests.worker_pool import WorkerPool

ROUTING = ["layers.*.router.*"]


@functools.cache
def one_process(pool: WorkerPool, odd: bool = False) -> Arrays:
    (values,) = pool.run(1, run_trace, [], odd_ids() if odd else case_ids())
    return values


def assert_equal(actual: Arrays, right: Arrays, tolerance: float = 1e-5) -> None:
    assert list(actual) == list(right)
    for name, value in right.items():
        assert actual[name].shape == value.shape and actual[name].dtype == value.dtype, name
        if value.dtype == np.int64:
            assert (actual[name] == value).all(), name
        else:
            assert relative(actual[name], value) <= tolerance, name


def test_sites_in_the_order_of_the_forward_pass(pool: WorkerPool) -> None:
    values = one_process(pool)
    names = list(values)
    assert names == [site.name for site in sites(model_spec(released_config()))]
    assert names[:2] == ["embedding", "layers.0.attention.input"]
    third = [name for name in names if name.startswith("layers.3.")]
    assert [name.removeprefix("layers.3.") for name in third] == [
        "attention.input", "attention.output", "ffn.input", "ffn.router.scores", "ffn.router.experts",
        "ffn.router.weights", "ffn.shared.output", "ffn.output", "output",
    ]  # fmt: skip
    depth = [name.removeprefix("mtp.1.") for name in names if name.startswith("mtp.1.")]
    assert depth == [
        "embedding_norm.output", "hidden_norm.output", "projection.output", "layer.attention.input",
        "layer.attention.output", "layer.ffn.input", "layer.ffn.output", "layer.output", "final_norm.output", "logits",
    ]  # fmt: skip
    assert names.index("final_norm.output") < names.index("logits") < names.index("mtp.0.embedding_norm.output")


def test_values_are_what_the_model_computes(pool: WorkerPool) -> None:
    values, right = one_process(pool), expected()
    embedding = released_weights()["model.embed_tokens.weight"]
    assert (values["embedding"] == embedding[case_ids()].numpy()).all()
    assert np.abs(values["logits"] - right["logits"].numpy()).max() <= 1e-4
    for k in range(3):
        assert np.abs(values[f"mtp.{k}.logits"] - right["mtp_logits"][k].numpy()).max() <= 1e-4
    for layer in range(9):
        before = values[f"layers.{layer - 1}.output"] if layer else values["embedding"]
        added = values[f"layers.{layer}.attention.output"] + values[f"layers.{layer}.ffn.output"]
        assert relative(before + added, values[f"layers.{layer}.output"]) <= 1e-6
    scores, experts = values["layers.5.ffn.router.scores"], values["layers.5.ffn.router.experts"]
    weights = values["layers.5.ffn.router.weights"]
    assert experts.shape == (2, 40, 3) and (np.diff(experts) > 0).all(), "ascending"
    selected = np.take_along_axis(scores, experts, axis=-1)
    assert np.allclose(weights, 3 * selected / selected.sum(-1, keepdims=True), rtol=1e-5), "in the experts' order"


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "one process"])
def test_layouts_record_what_one_process_does(pool: WorkerPool, name: str) -> None:
    """With rows and lengths that do not divide."""
    world_size, overrides = LAYOUTS[name]
    first, *others = pool.run(world_size, run_trace, overrides, odd_ids())
    assert_equal(first, one_process(pool, odd=True))
    assert not any(others)


def test_chosen_sites(pool: WorkerPool) -> None:
    (values,) = pool.run(1, run_trace, [], case_ids(), ["layers.3.ffn.router.*", "*.logits"])
    assert list(values) == [
        "layers.3.ffn.router.scores", "layers.3.ffn.router.experts", "layers.3.ffn.router.weights",
        "mtp.0.logits", "mtp.1.logits", "mtp.2.logits",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*layers\.9\.\* names no site(.|\n)*router names no site"):
        choose(sites(model_spec(released_config())), ["layers.9.*", "logits", "router"])


def transformers_values(experts: dict[int, torch.Tensor] | None = None) -> Arrays:
    model = without_mtp(released_config())
    trunk = load_transformers(open_weights(CASE), model, "fp32")
    return dict(trace_transformers(trunk, case_ids(), transformers_sites(model_spec(model)), experts))


def test_transformers_agrees_at_every_site(pool: WorkerPool) -> None:
    theirs, ours = transformers_values(), one_process(pool)
    main = [name for name in ours if not name.startswith("mtp.")]
    assert_equal(theirs, {name: ours[name] for name in main})
    assert np.abs(theirs["logits"] - ours["logits"]).max() <= 1e-4


def test_transformers_agrees_with_replayed_routing(pool: WorkerPool) -> None:
    """Experts that neither would choose, so that nothing of a run's own choice is left."""
    experts = shifted(one_process(pool))
    theirs = transformers_values(experts)
    (ours,) = pool.run(1, run_trace, ["model.mtp.depths=0"], case_ids(), (), experts)
    assert_equal(theirs, ours)
    assert relative(ours["logits"], one_process(pool)["logits"]) > 0.1
    for layer, recorded in experts.items():
        assert (ours[f"layers.{layer}.ffn.router.experts"] == recorded.numpy()).all()


@pytest.mark.parametrize("name", ["PP2xEP2", "CP2xTP2", "DP2"])
def test_replayed_routing_under_layouts(pool: WorkerPool, name: str) -> None:
    world_size, overrides = LAYOUTS[name]
    experts = shifted(one_process(pool, odd=True))
    (right,) = pool.run(1, run_trace, [], odd_ids(), [*ROUTING, "logits"], experts)
    first, *_ = pool.run(world_size, run_trace, overrides, odd_ids(), [*ROUTING, "logits"], experts)
    assert_equal(first, right)


def test_replaying_a_runs_own_routing_changes_nothing(pool: WorkerPool) -> None:
    own = {
        int(name.split(".")[1]): torch.from_numpy(value)
        for name, value in one_process(pool).items()
        if name.endswith("router.experts")
    }
    (result,) = pool.run(1, run_logits, [], case_ids(), "fp32", own)
    assert np.abs(result["logits"] - expected()["logits"].numpy()).max() <= 1e-4


def test_replay_as_a_context() -> None:
    """On routers alone: weights come from the run's own scores; afterwards the router chooses again."""
    model = build_model(released_config())
    load_released(model, released_weights())
    router = model.routers()[4]
    h_TH = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    free = router(h_TH)
    recorded = (free.experts_TK + 1) % 8
    with replay_routing({4: router}, {4: recorded}):
        replayed = router(h_TH)
    selected = free.scores_TE.gather(1, recorded)
    assert torch.equal(replayed.experts_TK, recorded)
    torch.testing.assert_close(replayed.weights_TK, 3.0 * selected / selected.sum(1, keepdim=True))
    assert torch.equal(router(h_TH).experts_TK, free.experts_TK)
    with replay_routing({4: router}, {4: recorded[:5]}), pytest.raises(ValueError, match=r"\[5, 3\], the router's"):
        router(h_TH)


def test_routing_of_another_run_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    values = one_process(pool)
    spec, ids = model_spec(released_config()), case_ids()
    whole = write_trace(tmp_path / "whole.npz", ids, values)
    assert read_routing(whole, spec, ids.numpy()).keys() == {3, 4, 5, 6, 7, 8}
    with pytest.raises(ConfigError, match="input_ids are other ones"):
        read_routing(whole, spec, (ids + 1).numpy())
    broken = {
        "layers.3.ffn.router.experts": values["layers.3.ffn.router.experts"][:, :39],
        "layers.4.ffn.router.experts": values["layers.4.ffn.router.experts"] + 5,
        "layers.5.ffn.router.experts": values["layers.5.ffn.router.experts"].astype(np.float32),
        "layers.6.ffn.router.experts": np.zeros_like(values["layers.6.ffn.router.experts"]),
        "layers.7.ffn.router.experts": values["layers.7.ffn.router.experts"],
    }
    with pytest.raises(ConfigError) as refused:
        read_routing(write_trace(tmp_path / "broken.npz", ids, broken), spec, ids.numpy())
    assert [problem.split(".")[1] for problem in refused.value.problems] == ["3", "4", "5", "6", "8"]


def test_an_archive_keeps_the_order(pool: WorkerPool, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.npz", case_ids(), one_process(pool))
    with open_archive(path) as archive:
        assert archive.names == [INPUT_IDS, *one_process(pool)]
    assert [file.name for file in tmp_path.iterdir()] == ["trace.npz"]


@pytest.mark.parametrize(("version", "text"), [("5.15.2", "5.15.2 is installed"), (None, "is not installed")])
def test_transformers_must_be_there(monkeypatch: pytest.MonkeyPatch, version: str | None, text: str) -> None:
    def installed(_: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(UserError, match=rf"transformers 5\.16 or newer.*{text}.*pip install"):
        load_transformers(open_weights(CASE), without_mtp(released_config()), "fp32")


def test_what_transformers_does_not_have_is_refused() -> None:
    model = released_config(clamp=released_config().clamp.model_copy(update={"position": "before_silu"}))
    with pytest.raises(ConfigError, match=r"model\.clamp\.position is before_silu"):
        load_transformers(open_weights(CASE), without_mtp(model), "fp32")
