"""Rules from YAML: a user's file on top of the defaults, and everything that can be wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptron_metrics.alerts.loading import default_text, load_rules, switched_off
from steptron_metrics.alerts.rule import Baseline, DerivedWatch, ItemsWatch, Rule
from steptron_metrics.errors import MetricsError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rules.yaml"


def loaded(file: Path, text: str) -> dict[str, Rule]:
    file.write_text(text)
    return {rule.name: rule for rule in load_rules(file)}


def refused(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(MetricsError) as error:
        load_rules(file)
    return str(error.value)


def test_the_defaults_are_what_is_asked_for() -> None:
    assert {rule.name for rule in load_rules()} == {
        *("blow_up_intermediate", "blow_up_output", "layer_growth", "layer_apart", "expert_collapse"),
        *("routing_collapse", "ep_straggling", "group_imbalance", "skipped_steps"),
        *("muon_outlier", "falling_confidence", "straggling_rank", "missing_ranks", "dropped_frames", "non_finite"),
        "stale_run",
    }
    assert "regardless" in default_text()


def test_rules_are_changed_switched_off_and_added(file: Path) -> None:
    rules = loaded(
        file,
        """
        blow_up_output: {above: 50, for: 7, baseline: {times: 4}}
        routing_collapse: {enabled: false}
        big_weights:
          watch: {derived: weight.norm.expert_up.max_over_median}
          above: 5
          saw: "{where}: {value}"
          cause: unknown
          remedy: look
        """,
    )
    changed, before = rules["blow_up_output"], {rule.name: rule for rule in load_rules()}["blow_up_output"]
    assert (changed.threshold, changed.for_iterations, changed.baseline) == (50, 7, Baseline(4, 256))
    assert (changed.regardless, changed.saw, changed.watch) == (before.regardless, before.saw, before.watch)
    assert "routing_collapse" not in rules
    assert rules["big_weights"].watch == DerivedWatch("weight.norm.expert_up.max_over_median")
    assert rules["big_weights"].severity == "warning"


def test_what_is_switched_off_is_named(file: Path) -> None:
    loaded(file, "stale_run: {enabled: false}\nblow_up_output: {above: 12}\nrouting_collapse: {enabled: false}")
    assert switched_off(file) == ("stale_run", "routing_collapse") and switched_off() == ()


def test_a_change_of_direction(file: Path) -> None:
    rules = loaded(file, "falling_confidence: {above: 0.9, baseline: {times: 2}}")
    assert not rules["falling_confidence"].is_below and rules["falling_confidence"].threshold == 0.9


def test_metrics_of_ones_own(file: Path) -> None:
    text = "mine: {watch: {metric: my.thing, own_metric: %s}, above: 1, saw: s, cause: c, remedy: r}"
    assert loaded(file, text % "true")["mine"].watch == ItemsWatch("my.thing", "mean", "none", True)
    assert "mine: watch.metric: my.thing is not measured" in refused(file, text % "false")


def test_an_empty_file_changes_nothing(file: Path) -> None:
    assert loaded(file, "# nothing\n") == {rule.name: rule for rule in load_rules()}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("blow_up_output: {abov: 3}", "blow_up_output: abov is no known key, did you mean above?"),
        ("blow_up_output: {above: high}", "above: expected a number, found 'high'"),
        ("blow_up_output: {above: 1e-3}", "found '1e-3', write 1.0e-3 for 1e-3"),
        ("blow_up_output: {above: .nan}", "above: expected a number, found nan"),
        ("blow_up_output: {above: true}", "above: expected a number, found True"),
        ("blow_up_output: {above: 200}", "regardless 100 is below the threshold 200: it has to lie beyond it"),
        ("expert_collapse: {regardless: 0.5}", "regardless 0.5 is above the threshold 0.1"),
        ("blow_up_output: {above: 3, below: 3}", "above and below: a rule has one of them"),
        ("blow_up_output: {for: 0}", "for: expected a whole number from 1 to 1000000, found 0"),
        ("blow_up_output: {for: 2.5}", "for: expected a whole number"),
        ("blow_up_output: {clear_at: 2}", "clear_at 2: expected 0.001 to 1"),
        ("blow_up_output: {severity: criticl}", "severity: 'criticl' is not one of them, did you mean critical?"),
        ("blow_up_output: {checkpoint: sure}", "checkpoint: expected true or false, found 'sure'"),
        ("blow_up_output: {baseline: {times: 0.5}}", "baseline.times 0.5: expected at least 1"),
        ("blow_up_output: {baseline: {iterations: 64}}", "baseline.times is missing"),
        ("blow_up_output: {baseline: {times: 2, iterations: 100}}", "expected a multiple of 16"),
        ("blow_up_output: {baseline: 3}", "baseline: expected {times, iterations, best, before}, found a number"),
        ("blow_up_output: {watch: moe.output_norm_max}", "watch: expected {metric, statistic, relative_to}, {derived}"),
        ("blow_up_output: {watch: {metrc: x}}", "metrc: did you mean metric?"),
        ("blow_up_output: {watch: {metric: moe.output_norm_mx}}", "did you mean moe.output_norm_max?"),
        ("blow_up_output: {watch: {metric: moe.tokens, statistic: p98}}", "statistic: 'p98' is not one of them"),
        ("ep_straggling: {watch: {derived: moe.stragler_factor}}", "did you mean moe.straggler_factor?"),
        ("ep_straggling: {while: {metric: moe.tokens, above: 1}}", "while needs a watch of items"),
        ("expert_collapse: {while: {metric: weight.norm, above: 1}}", "weight.norm needs the role of a matrix"),
        ("expert_collapse: {while: {metric: moe.tokens}}", "while: expected either above or below"),
        ("missing_ranks: {watch: {iteration: missing_rank}}", "did you mean missing_ranks?"),
        (
            "skipped_steps: {watch: {event: 3}}",
            "watch.event: expected an event's kind, such as skipped, found a number",
        ),
        ("skipped_steps: {regardless: 2}", "regardless is for metrics and derived figures"),
        (
            "expert_collapse: {watch: {metric: moe.tokens, relative_to: stage}}",
            "stage is for metrics of ranks, such as rank.compute_seconds",
        ),
        ("blow_up_output: {baseline: {times: 2, best: 0.5}}", "baseline.best 0.5: expected at least 1"),
        ("missing_ranks: {baseline: {times: 2}}", "baseline is for metrics and derived figures"),
        ("stale_run: {above: 0}", "silence is watched with above, a number of seconds greater than 0"),
        ("blow_up_output: {saw: '{valu}'}", "saw: {valu} is nothing that a text may name, did you mean value?"),
        ("blow_up_output: {saw: '{value.real}'}", "{value.real} is nothing that a text may name"),
        ("blow_up_output: {saw: '{value:9999999999d}'}", "saw: {value} takes no format"),
        ("blow_up_output: {saw: '{'}", "braces that stand for themselves are doubled"),
        ("new: {}", "new: watch: expected"),
        ("new: {watch: {metric: train.loss}, saw: s, cause: c, remedy: r}", "new: needs above or below"),
        ("New: {above: 3}", "'New' is no name of a rule"),
        ("3: {above: 3}", "3 is no name of a rule"),
        ("blow_up_output: 7", "blow_up_output: expected a mapping of keys, found a number"),
        ("[1, 2]", "expected a mapping of rules by name, found a list"),
        ("a: {b: 1", "no YAML"),
        ("blow_up_output: {above: 3}\nblow_up_output: {above: 4}", "blow_up_output is there twice"),
        ("!!python/object/apply:os.system ['true']", "no YAML"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, part: str) -> None:
    assert part in refused(file, text)


def test_all_problems_are_listed(file: Path) -> None:
    message = refused(file, "blow_up_output: {above: x, for: -1}\nnew: {watch: {metric: train.loss}, sow: s}")
    assert message.startswith(f"{file}: 7 problems\n  - blow_up_output: above")
    for part in (
        "for: expected",
        "sow is no known key, did you mean saw?",
        "saw: expected text",
        "needs above or below",
    ):
        assert part in message


def test_a_file_that_cannot_be_read(file: Path) -> None:
    with pytest.raises(MetricsError, match="cannot be read: No such file"):
        load_rules(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MetricsError, match="no UTF-8 text"):
        load_rules(file)
