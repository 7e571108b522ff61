"""The first site where two traces part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steptron.errors import ConfigError, UserError
from steptron.inspection.archive import write_arrays
from steptron.inspection.trace_diff import compare_traces
from tests.inspection.runs import case_ids, run_trace, write_trace
from tests.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def right(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (values,) = pool.run(1, run_trace, [], case_ids())
    return write_trace(tmp_path_factory.mktemp("traces") / "right.npz", case_ids(), values)


@pytest.mark.parametrize(
    ("override", "site"),
    [
        ("model.clamp.position=before_silu", "layers.7.ffn.output"),
        ("model.sliding.window=7", "layers.1.attention.output"),
        ("model.full.rope.theta=10000.0", "layers.0.attention.output"),
        ("model.moe.scaling_factor=1.0", "layers.3.ffn.router.weights"),
        ("model.mtp.chain=post_norm", "mtp.0.hidden_norm.output"),
        ("model.mtp.head=shared", "mtp.0.logits"),
    ],
)
def test_a_wrong_option_is_found_where_it_acts(
    pool: WorkerPool, right: Path, tmp_path: Path, override: str, site: str
) -> None:
    (values,) = pool.run(1, run_trace, [override], case_ids())
    difference = compare_traces(right, write_trace(tmp_path / "wrong.npz", case_ids(), values), 1e-4)
    assert difference.first_parted is not None and difference.first_parted.name == site
    assert not difference.only_in_first and not difference.only_in_second
    before = difference.sites[: difference.sites.index(difference.first_parted)]
    assert all(earlier.relative == 0.0 for earlier in before)


def test_a_layout_is_equal(pool: WorkerPool, right: Path, tmp_path: Path) -> None:
    values, *_ = pool.run(2, run_trace, ["parallel.tensor=2", "parallel.expert=2"], case_ids())
    difference = compare_traces(right, write_trace(tmp_path / "layout.npz", case_ids(), values), 1e-4)
    assert difference.first_parted is None and len(difference.sites) == 102
    assert any(site.max_abs > 0 for site in difference.sites)


def write(path: Path, **arrays: object) -> Path:
    write_arrays(path, [(name.replace("__", "."), np.asarray(array)) for name, array in arrays.items()])
    return path


def test_figures(tmp_path: Path) -> None:
    a = write(tmp_path / "a.npz", x=[[3.0, 4.0]], layers__3__ffn__router__experts=[[[0, 1], [2, 5]]], only_a=[1.0])
    b = write(tmp_path / "b.npz", x=[[3.0, 3.5]], layers__3__ffn__router__experts=[[[1, 0], [2, 4]]], only_b=[1.0])
    difference = compare_traces(a, b, 0.1)
    number, experts = difference.sites
    assert (number.max_abs, number.relative, number.rerouted, number.parted) == (0.5, 0.1, None, False)
    assert (experts.rerouted, experts.tokens, experts.parted) == (1, 2, True), "their order does not count"
    assert (difference.only_in_first, difference.only_in_second) == (("only_a",), ("only_b",))
    assert compare_traces(a, b, 0.09).sites[0].parted


@pytest.mark.parametrize(("value", "parted"), [(np.nan, True), (np.inf, True), (0.0, False), (1e-30, True)])
def test_values_that_no_ratio_fits(tmp_path: Path, value: float, parted: bool) -> None:
    a, b = write(tmp_path / "a.npz", x=[[0.0]]), write(tmp_path / "b.npz", x=[[value]])
    assert compare_traces(a, b, 1.0).sites[0].parted is parted


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a.npz", input_ids=[[1]], x=[[1.0]], y=[[1.0]])
    with pytest.raises(ConfigError, match="input_ids differ"):
        compare_traces(a, write(tmp_path / "b.npz", input_ids=[[2]], x=[[1.0]]), 0.1)
    with pytest.raises(ConfigError, match="no site in common"):
        compare_traces(a, write(tmp_path / "b.npz", input_ids=[[1]], z=[[1.0]]), 0.1)
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*x has shape(.|\n)*y holds"):
        compare_traces(a, write(tmp_path / "b.npz", x=[[1.0, 2.0]], y=[["text"]]), 0.1)
    with pytest.raises(UserError, match="there is no such file"):
        compare_traces(a, tmp_path / "absent.npz", 0.1)
    (tmp_path / "text.npz").write_text("text")
    with pytest.raises(UserError, match=r"is no \.npz file"):
        compare_traces(a, tmp_path / "text.npz", 0.1)
    np.savez(tmp_path / "pickled.npz", x=np.array([[object()]]))
    with pytest.raises(UserError, match="x cannot be read"):
        compare_traces(a, tmp_path / "pickled.npz", 0.1)
