"""tools/reproduce/blowup.py: the corpus, what is read back and compared, and a whole study of a few steps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from steptron.config.loader import load
from steptron_metrics.server.local import running
from steptron_metrics.settings import Settings
from tools.reproduce import blowup
from tools.reproduce.blowup import BALANCE, BLOW_UP, CONFIG, LIMIT, Arm, Run
from tools.reproduce.corpus import write_corpus
from tools.reproduce.figures import draw_balance, draw_blow_up
from tools.reproduce.readings import Readings, common_loss, load_at, peak, running_median, share_over, trailing_mean

REPOSITORY = Path(__file__).resolve().parents[2]


def readings(steps: int = 200, **changes: np.ndarray) -> Readings:
    flat = Readings(
        loss=np.linspace(4.0, 2.0, steps),
        ratio=np.full(steps, 2.0),
        layer=np.full(steps, 3),
        largest=np.full(steps, 20.0),
        median=np.full(steps, 10.0),
        alignment=np.where(np.arange(steps) % 10 == 9, 0.5, np.nan),
        usual_alignment=np.where(np.arange(steps) % 10 == 9, 0.2, np.nan),
        load=np.full(steps, 1.5),
        shares=np.ones((2, steps, 4)),
    )
    return replace(flat, **changes)


def test_the_planted_bigrams_make_up_what_they_should(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl", 100_000, pairs=2, rate=0.18)
    documents = [json.loads(line)["text"].split() for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    words = Counter(word for document in documents for word in document)
    bigrams = Counter(pair for document in documents for pair in pairwise(document))
    total = sum(words.values())
    frequent = [pair for pair, _ in bigrams.most_common(2)]
    # Drawn two to one, and their words come nowhere else.
    shares = [2 * bigrams[pair] / total for pair in frequent]
    assert sum(shares) == pytest.approx(2 * 0.18 / 1.18, rel=0.03)
    assert shares[0] / shares[1] == pytest.approx(2, rel=0.1)
    for first, second in frequent:
        assert words[first] == words[second] == bigrams[first, second]
    # Markov: a word's most frequent follower comes far more often than the word does overall.
    assert total >= 100_000 and len(words) == 90


def test_a_corpus_depends_on_nothing_but_its_arguments(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_corpus(tmp_path / name, 5_000, pairs=2, rate=0.18, seed=seed)
    first, same, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == same != other


@pytest.mark.parametrize("arm", [*BLOW_UP, *BALANCE], ids=lambda arm: arm.name)
def test_an_arm_changes_what_its_title_says_and_nothing_else(arm: Arm, tmp_path: Path) -> None:
    overrides = Run(arm, seed=2, steps=7).overrides(tmp_path)
    config = load(REPOSITORY / CONFIG, overrides).config
    plain = load(REPOSITORY / CONFIG, Run(BLOW_UP[0], seed=2, steps=7).overrides(tmp_path)).config
    assert (config.train.seed, config.data.seed, config.train.steps) == (2, 2, 7)
    moe_layers = range(config.model.num_dense_layers, config.model.num_layers)
    limits = dict.fromkeys(moe_layers, LIMIT) if arm.name == "activations" else {}
    assert config.model.clamp.routed == limits
    assert (config.optimizer.weight_clipping.threshold is not None) == (arm.name == "weights")
    assert (config.balance.ep_loss_coefficient > 0) == (arm.name in ("ep-report", "ep-strong"))
    assert (config.balance.bias.rate == 0) == arm.name.startswith("ep-")
    for section in ("data", "loss", "parallel", "telemetry"):
        assert getattr(config, section) == getattr(plain, section)


def test_one_wild_step_is_no_peak() -> None:
    ratio = np.full(200, 2.0)
    ratio[50] = 1000.0
    ratio[120:160] = 9.0
    largest = np.where(ratio == 9.0, 90.0, 20.0)
    top = peak(readings(ratio=ratio, largest=largest))
    assert (top.ratio, top.largest, top.median, top.layer) == (9.0, 90.0, 10.0, 3)
    assert (top.alignment, top.usual_alignment) == (0.5, 0.2)
    assert 120 <= top.step <= 160
    assert share_over(readings(ratio=ratio), 8.0) == pytest.approx(40 / 200, abs=0.01)


def test_a_running_median_is_centred_and_shrinks_at_the_ends() -> None:
    values = np.array([5.0, 1.0, 3.0, 100.0, 4.0])
    assert running_median(values, 3).tolist() == [3.0, 3.0, 3.0, 4.0, 52.0]
    assert trailing_mean(values, 2).tolist() == [3.0, 2.0, 51.5, 52.0]


def test_loads_are_compared_where_losses_are_equal() -> None:
    """The slower run gets to the loss of 3.0 at twice the steps; its load is that of those steps."""
    fast, slow = np.linspace(4.0, 2.0, 200), np.linspace(4.0, 3.0, 200)
    load = np.linspace(3.0, 1.0, 200)
    quick, late = readings(loss=fast, load=load), readings(loss=slow, load=load)
    loss = common_loss([quick, late], 10)
    assert loss == pytest.approx(slow[-10:].mean())
    at_quick, at_late = load_at(quick, loss, 10), load_at(late, loss, 10)
    assert at_late.step == 200 and at_quick.step == pytest.approx(100, abs=6)
    assert at_late.in_micro_batch == pytest.approx(load[-10:].mean())
    assert at_quick.in_micro_batch == pytest.approx(load[at_quick.step - 10 : at_quick.step].mean())
    with pytest.raises(ValueError, match="never comes down to 1"):
        load_at(quick, 1.0, 10)


def test_groups_that_take_turns_are_balanced_over_a_window_though_not_in_a_micro_batch() -> None:
    shares = np.ones((2, 200, 4))
    shares[0, ::2], shares[0, 1::2] = [2, 0, 1, 1], [0, 2, 1, 1]
    shares[1] = [3, 1, 0, 0]
    at = load_at(readings(shares=shares, load=shares.max(axis=2).mean(axis=0)), 5.0, 10)
    assert at.in_micro_batch == pytest.approx((2 + 3) / 2)
    assert at.over_window == pytest.approx((1 + 3) / 2)


def test_figures_are_drawn(tmp_path: Path) -> None:
    runs = {"one": [readings(), readings()], "two": [readings(), readings()]}
    draw_blow_up(runs, tmp_path / "a.png")
    draw_balance(runs, tmp_path / "b.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


def test_a_run_goes_through_the_server_and_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = blowup.build_dataset(tmp_path, num_words=200_000)
    arm = Arm(
        "weights",
        "weight clipping",
        (
            "optimizer.weight_clipping.threshold=1",
            "optimizer.schedule.warmup_steps=2",
            "train.validation.batches=1",
        ),
    )
    with running(Settings(tmp_path / "server", port=0, http_port=0)) as server:
        results = blowup.study([arm], [1], 10, dataset, tmp_path, server)[arm]
        found = results.readings[0]
        log = [json.loads(line) for line in (tmp_path / "weights-1" / "log.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["lm_loss"] for line in log if line["kind"] == "train"}
        assert found.loss[9] == pytest.approx(losses[10], rel=1e-6)
        assert results.losses == [line["lm_loss"] for line in log if line["kind"] == "validation"]
        assert len(found.loss) == 10 and found.shares.shape == (3, 10, 4)
        np.testing.assert_allclose(found.shares.sum(axis=2), 4, rtol=1e-5)
        np.testing.assert_allclose(found.largest / found.median, found.ratio, rtol=1e-5)
        np.testing.assert_allclose(found.load, found.shares.max(axis=2).mean(axis=0), rtol=1e-5)
        # Sampled in every tenth step.
        assert np.isnan(found.alignment[:9]).all() and 0 < found.alignment[9] <= 1
        assert 0 < found.usual_alignment[9] <= 1
        assert set(found.layer) <= {1, 2, 3} and (found.ratio >= 1).all()

        def refuse(*_: object) -> None:
            raise AssertionError("a run is made again")

        monkeypatch.setattr(blowup, "_steptron", refuse)
        again = blowup.study([arm], [1], 10, dataset, tmp_path, server)[arm]
        np.testing.assert_array_equal(again.readings[0].ratio, found.ratio)
        with pytest.raises(AssertionError, match="made again"):
            blowup.study([replace(arm, overrides=("optimizer.lr=1e-3",))], [1], 10, dataset, tmp_path, server)
