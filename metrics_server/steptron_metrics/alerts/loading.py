"""Rules from YAML: the defaults, and a user's file on top of them."""

from __future__ import annotations

import difflib
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml

from steptron_metrics.alerts.rule import (
    BLOCK,
    Baseline,
    Companion,
    DerivedWatch,
    EventWatch,
    ItemsWatch,
    IterationFigure,
    IterationWatch,
    Relative,
    Rule,
    Severity,
    SilenceWatch,
    Watch,
)
from steptron_metrics.catalogue import METRICS, Metric, Statistic, find
from steptron_metrics.errors import MetricsError

FIELDS = (
    *("value", "threshold", "baseline", "companion", "metric", "where", "layer", "item", "items"),
    *("iteration", "since", "lasted", "detail"),
)
"""What the texts of a rule may name in braces."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KEYS = (
    *("watch", "above", "below", "baseline", "regardless", "while", "warm_up", "for", "clear_at", "clear_for"),
    *("severity", "max_open", "checkpoint", "saw", "cause", "remedy", "enabled"),
)
_LARGEST = 1_000_000
_MAX_FILE_BYTES = 1 << 20


def default_text() -> str:
    """The default rules as they stand in their file, with the explanation of every key."""
    return resources.files(__package__).joinpath("default_rules.yaml").read_text(encoding="utf-8")


def load_rules(file: Path | None = None) -> tuple[Rule, ...]:
    """The default rules, changed by a user's file.

    Raises:
        MetricsError: the file cannot be read, or what it says cannot be used; the message lists all problems.
    """
    merged: dict[str, Any] = _parse(default_text(), "default rules")
    title = "default rules"
    if file is not None:
        title = str(file)
        for name, changes in _parse(_read(file), title).items():
            known = merged.get(name, {})
            if not isinstance(changes, dict):
                merged[name] = changes
                continue
            # The direction is one of two keys: giving the one takes the other away.
            if {"above", "below"} & set(changes):
                known = {key: value for key, value in known.items() if key not in ("above", "below")}
            merged[name] = {**known, **changes}
    return rules_from(merged, title)


def switched_off(file: Path | None = None) -> tuple[str, ...]:
    """Names of the rules that a user's file switches off, in the order of the file.

    Raises:
        MetricsError: as :func:`load_rules`.
    """
    if file is None:
        return ()
    loaded = {rule.name for rule in load_rules(file)}
    return tuple(str(name) for name in _parse(_read(file), str(file)) if name not in loaded)


def rules_from(content: Mapping[Any, Any], title: str) -> tuple[Rule, ...]:
    """Rules from a mapping of names to their keys, those that are switched off left out.

    Raises:
        MetricsError: listing all problems.
    """
    problems: list[str] = []
    rules = []
    for name, keys in content.items():
        reader = _Reader(str(name), problems)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            problems.append(f"{name!r} is no name of a rule: expected lower case letters, digits and _")
        elif not isinstance(keys, dict):
            problems.append(f"{name}: expected a mapping of keys, found {_kind(keys)}")
        elif (rule := reader.rule(keys)) is not None:
            rules.append(rule)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise MetricsError("\n".join([f"{title}: {count}", *(f"  - {problem}" for problem in problems)]))
    return tuple(rules)


class _Loader(yaml.SafeLoader):
    """Takes no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is there twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else id(key_node))
        return dict(super().construct_mapping(node, deep))


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise MetricsError(f"{file}: larger than {_MAX_FILE_BYTES} bytes: this is no file of alert rules")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise MetricsError(f"{file}: the alert rules cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MetricsError(f"{file}: the alert rules are no UTF-8 text") from error


def _parse(text: str, title: str) -> dict[Any, Any]:
    try:
        content = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise MetricsError(f"{title}: no YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise MetricsError(f"{title}: expected a mapping of rules by name, found {_kind(content)}")
    return content


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


def nearest(word: str, known: Sequence[str]) -> str:
    """For a message: the likeliest that was meant, or all."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


class _Reader:
    """Reads one rule, noting what is wrong."""

    def __init__(self, name: str, problems: list[str]) -> None:
        self._name, self._problems = name, problems

    def rule(self, keys: dict[Any, Any]) -> Rule | None:
        before = len(self._problems)
        self._known(keys, _KEYS, "")
        enabled = self._boolean(keys, "enabled", True)
        watch = self._watch(keys.get("watch"))
        threshold, is_below = self._direction(keys, watch)
        baseline = self._baseline(keys.get("baseline"))
        rule = {
            "severity": self._choice(keys, "severity", get_args(Severity), "warning"),
            "baseline": baseline,
            "regardless": self._number(keys, "regardless", None),
            "companion": self._companion(keys.get("while")),
            "warm_up": self._whole(keys, "warm_up", 0, least=0),
            "for_iterations": self._whole(keys, "for", 1, least=1),
            "clear_at": self._number(keys, "clear_at", 1.0, least=1e-3, most=1.0),
            "clear_for": self._whole(keys, "clear_for", 1, least=1),
            "max_open": self._whole(keys, "max_open", 8, least=1, most=1000),
            "checkpoint": self._boolean(keys, "checkpoint", False),
            "saw": self._text(keys, "saw"),
            "cause": self._text(keys, "cause"),
            "remedy": self._text(keys, "remedy"),
        }
        self._consistent(watch, rule, threshold, is_below)
        if len(self._problems) > before or watch is None or not enabled:
            return None
        return Rule(name=self._name, watch=watch, threshold=threshold, is_below=is_below, **rule)  # type: ignore[arg-type]

    def _consistent(self, watch: Watch | None, rule: dict[str, Any], threshold: float | None, is_below: bool) -> None:
        if isinstance(watch, IterationWatch | EventWatch | SilenceWatch):
            for key in ("baseline", "regardless", "companion"):
                if rule[key] is not None:
                    self._wrong(f"{'while' if key == 'companion' else key} is for metrics and derived figures")
        if isinstance(watch, DerivedWatch) and rule["companion"] is not None:
            self._wrong("while needs a watch of items: {metric, statistic, relative_to}")
        regardless, baseline = rule["regardless"], rule["baseline"]
        if regardless is not None and threshold is not None and (regardless < threshold) != is_below:
            side = "above" if is_below else "below"
            self._wrong(f"regardless {regardless:g} is {side} the threshold {threshold:g}: it has to lie beyond it")
        if threshold is None and baseline is None and not isinstance(watch, SilenceWatch | None):
            self._wrong("needs above or below")

    # ------------------------------------------------------------------------------------- parts

    def _watch(self, content: object, where: str = "watch") -> Watch | None:
        kinds: dict[str, Callable[[dict[Any, Any], str], Watch | None]] = {
            "metric": self._items,
            "derived": self._derived,
            "iteration": self._iteration,
            "event": self._event,
            "silence": self._silence,
        }
        forms = "{metric, statistic, relative_to}, {derived}, {iteration}, {event} or {silence}"
        expected = f"{where}: expected {forms}"
        if not isinstance(content, dict):
            self._wrong(f"{expected}, found {_kind(content)}")
            return None
        found = [kind for kind in kinds if kind in content]
        if len(found) != 1:
            others = [str(key) for key in content if key not in kinds]
            hint = f"; {others[0]}: {nearest(others[0], list(kinds))}" if others else ""
            self._wrong(expected + hint)
            return None
        return kinds[found[0]](content, where)

    def _items(self, content: dict[Any, Any], where: str, also: Sequence[str] = ()) -> ItemsWatch | None:
        self._known(content, ("metric", "statistic", "relative_to", "own_metric", *also), where)
        own = self._boolean(content, "own_metric", False, where)
        name = content.get("metric")
        if not isinstance(name, str):
            self._wrong(f"{where}.metric: expected a name, found {_kind(name)}")
            return None
        known = find_watched(name)
        if known is None and not own:
            names = [metric.name for metric in METRICS]
            self._wrong(
                f"{where}.metric: {name} is not measured, {nearest(name, names)} (own_metric: true for one of yours)"
            )
        headline: str = "mean" if known is None else known.headline
        statistic = self._choice(content, "statistic", get_args(Statistic), headline, where)
        relative = self._choice(content, "relative_to", get_args(Relative), "none", where)
        if relative == "stage" and known is not None and known.items != "rank":
            self._wrong(f"{where}.relative_to: stage is for metrics of ranks, such as rank.compute_seconds")
        return ItemsWatch(name, statistic, relative, own)  # type: ignore[arg-type]

    def _derived(self, content: dict[Any, Any], where: str) -> DerivedWatch | None:
        self._known(content, ("derived", "same_item", "own_metric"), where)
        name = content["derived"]
        same_item = self._boolean(content, "same_item", False, where)
        own = self._boolean(content, "own_metric", False, where)
        if not isinstance(name, str):
            self._wrong(f"{where}.derived: expected a name, found {_kind(name)}")
            return None
        if not own and not _is_derived(name):
            self._wrong(f"{where}.derived: {name} is not derived, {nearest(name, _derived_names())}")
        return DerivedWatch(name, same_item, own)

    def _iteration(self, content: dict[Any, Any], where: str) -> IterationWatch:
        self._known(content, ("iteration",), where)
        figure = self._choice(content, "iteration", get_args(IterationFigure), "missing_ranks", where)
        return IterationWatch(figure)  # type: ignore[arg-type]

    def _event(self, content: dict[Any, Any], where: str) -> EventWatch | None:
        self._known(content, ("event",), where)
        kind = content["event"]
        if not isinstance(kind, str) or not kind:
            self._wrong(f"{where}.event: expected an event's kind, such as skipped, found {_kind(kind)}")
            return None
        return EventWatch(kind)

    def _silence(self, content: dict[Any, Any], where: str) -> SilenceWatch:
        self._known(content, ("silence", "over_after"), where)
        self._choice(content, "silence", ("run",), "run", where)
        return SilenceWatch(self._number(content, "over_after", 86_400.0, least=1.0, where=where) or 0.0)

    def _direction(self, keys: dict[Any, Any], watch: Watch | None) -> tuple[float | None, bool]:
        given = [key for key in ("above", "below") if key in keys]
        if len(given) == 2:
            self._wrong("above and below: a rule has one of them")
            return None, False
        if not given:
            return None, False
        threshold = self._number(keys, given[0], None)
        if isinstance(watch, SilenceWatch) and (given[0] == "below" or (threshold is not None and threshold <= 0)):
            self._wrong(f"{given[0]}: silence is watched with above, a number of seconds greater than 0")
        return threshold, given[0] == "below"

    def _baseline(self, content: object) -> Baseline | None:
        if content is None:
            return None
        if not isinstance(content, dict):
            self._wrong(f"baseline: expected {{times, iterations, best, before}}, found {_kind(content)}")
            return None
        self._known(content, ("times", "iterations", "best", "before"), "baseline")
        if "times" not in content:
            self._wrong("baseline.times is missing")
        times = self._number(content, "times", 2.0, least=1.0, where="baseline") or 2.0
        iterations = self._whole(content, "iterations", 256, least=2 * BLOCK, most=16_384, where="baseline")
        if iterations % BLOCK:
            self._wrong(f"baseline.iterations {iterations}: expected a multiple of {BLOCK}")
        best = self._number(content, "best", None, least=1.0, where="baseline")
        before = self._number(content, "before", None, where="baseline")
        return Baseline(times, iterations, best, before)

    def _companion(self, content: object) -> Companion | None:
        if content is None:
            return None
        if not isinstance(content, dict):
            self._wrong(f"while: expected {{metric, statistic, relative_to, above or below}}, found {_kind(content)}")
            return None
        watch = self._items(content, "while", ("above", "below"))
        if ("above" in content) == ("below" in content):
            self._wrong("while: expected either above or below")
        above = self._number(content, "above", None, where="while")
        below = self._number(content, "below", None, where="while")
        if watch is not None and not watch.own_metric and find(watch.metric) is None:
            self._wrong(f"while.metric: {watch.metric} needs the role of a matrix, such as {watch.metric}.expert_up")
        return None if watch is None else Companion(watch, above, below)

    # ------------------------------------------------------------------------------------ values

    def _wrong(self, problem: str) -> None:
        self._problems.append(f"{self._name}: {problem}")

    def _known(self, content: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
        for key in content:
            if key not in known:
                self._wrong(f"{where}{'.' if where else ''}{key} is no known key, {nearest(str(key), known)}")

    def _number(
        self,
        content: Mapping[Any, Any],
        key: str,
        default: float | None,
        least: float = -math.inf,
        most: float = math.inf,
        where: str = "",
    ) -> float | None:
        value = content.get(key, default)
        if value is None:
            if key in content:
                self._wrong(f"{_path(where, key)}: expected a number, found nothing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            # YAML 1.1 reads 1e-3 as text.
            hint = ", write 1.0e-3 for 1e-3" if isinstance(value, str) else ""
            self._wrong(f"{_path(where, key)}: expected a number, found {value!r}{hint}")
            return default
        if not least <= value <= most:
            limits = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            self._wrong(f"{_path(where, key)} {value:g}: expected {limits}")
            return default
        return float(value)

    def _whole(
        self, content: Mapping[Any, Any], key: str, default: int, least: int, most: int = _LARGEST, where: str = ""
    ) -> int:
        value = content.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._wrong(f"{_path(where, key)}: expected a whole number from {least} to {most}, found {value!r}")
            return default
        return value

    def _boolean(self, content: Mapping[Any, Any], key: str, default: bool, where: str = "") -> bool:
        value = content.get(key, default)
        if not isinstance(value, bool):
            self._wrong(f"{_path(where, key)}: expected true or false, found {value!r}")
            return default
        return value

    def _choice(self, content: Mapping[Any, Any], key: str, known: Sequence[str], default: str, where: str = "") -> str:
        value = content.get(key, default)
        if value not in known:
            self._wrong(f"{_path(where, key)}: {value!r} is not one of them, {nearest(str(value), known)}")
            return default
        return str(value)

    def _text(self, content: Mapping[Any, Any], key: str) -> str:
        value = content.get(key)
        if not isinstance(value, str) or not value.strip():
            self._wrong(f"{key}: expected text, found {_kind(value)}")
            return ""
        try:
            for _, field, form, conversion in string.Formatter().parse(value):
                if field is None:
                    continue
                if field not in FIELDS:
                    self._wrong(f"{key}: {{{field}}} is nothing that a text may name, {nearest(field, FIELDS)}")
                elif form or conversion:
                    self._wrong(f"{key}: {{{field}}} takes no format")
        except ValueError as error:
            self._wrong(f"{key}: {error} (braces that stand for themselves are doubled)")
        return " ".join(value.split())


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def find_watched(name: str) -> Metric | None:
    """A metric as rules name it: those by role with or without a role."""
    return find(name) or next((metric for metric in METRICS if metric.name == name), None)


_RELATIVE = ("max_over_median", "min_over_median")
_LEVELS = ("median", "over_layers")
_OTHER_DERIVED = (
    "moe.straggler_factor",
    "moe.straggler_worst",
    "moe.group_imbalance",
    "muon.largest",
    "rank.slowdown",
)


def _is_derived(name: str) -> bool:
    if name in _OTHER_DERIVED or re.fullmatch(r"gradient\.cosine_(max|min)\.[a-z0-9_]+", name):
        return True
    metric, _, figure = name.rpartition(".")
    known = find(metric)
    if known is None:
        return False
    return (figure in _RELATIVE and known.relative) or (figure in _LEVELS and known.levels)


def _derived_names() -> list[str]:
    by_metric = [
        f"{metric.name}{'.expert_up' if metric.by_role else ''}.{figure}"
        for metric in METRICS
        if metric.relative
        for figure in _RELATIVE
    ]
    levels = [f"{metric.name}.{figure}" for metric in METRICS if metric.levels for figure in _LEVELS]
    cosines = ["gradient.cosine_max.expert_up", "gradient.cosine_min.expert_up"]
    return [*by_metric, *levels, *_OTHER_DERIVED, *cosines]
