"""Filters of one's own, and what is said of wrong configurations."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from steptron.data.errors import DataError
from steptron.data.filters.config import load_filters
from steptron.data.filters.run import FilterOptions, filter_corpus
from steptron.errors import ConfigError
from tests.data.corpora import write_jsonl
from tests.data.filters.documents import kept_lines, removed_records, write_config

_DOCUMENTATION = Path(__file__).parents[3] / "docs" / "filters.md"


@pytest.fixture
def own_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with the worked examples of the documentation; returns its name."""
    name = "filters_of_the_documentation"
    source = "\n".join(re.findall(r"```python\n(.*?)```", _DOCUMENTATION.read_text("utf-8"), re.DOTALL))
    (tmp_path / f"{name}.py").write_text(source, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)  # the next test's is another file


def test_the_documented_filters_work_in_several_processes(tmp_path: Path, own_filters: str) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [{"text": text} for text in ("abc", "abé", "abc", "x", "ABC ", "xyz")] * 300
    )
    config = write_config(
        tmp_path / "c.yaml",
        filters={
            "copies": {"kind": f"{own_filters}:Copies"},  # stands after the others, wherever it is written
            "letters": {"kind": f"{own_filters}:Letters", "allowed": "abcxyz "},
            "length": {"min_characters": 2},
        },
    )
    for workers in (1, 2):
        options = FilterOptions([source], tmp_path / f"out{workers}", load_filters(config), workers)
        report = filter_corpus(options).report
        assert kept_lines(tmp_path / f"out{workers}") == [b'{"text": "abc"}', b'{"text": "xyz"}']
        counts = {name: {key: count.documents for key, count in each.items()} for name, each in report.reasons.items()}
        assert counts == {"copies": {"copy": 1198}, "letters": {"foreign": 300}, "length": {"few_characters": 300}}
    details = {record["detail"] for record in removed_records(tmp_path / "out1")}
    assert {"1 of 3 characters are not allowed", "equal to document 0"} < details


def test_each_corpus_filter_sees_what_those_before_it_kept(tmp_path: Path, own_filters: str) -> None:
    module = tmp_path / f"{own_filters}.py"
    module.write_text(
        module.read_text("utf-8")
        + """
class Unique(Copies):
    def judge(self, number):  # removes all documents that have a copy
        return KEEP if number not in {*self._copies, *self._copies.values()} else Verdict("not_unique")
""",
        "utf-8",
    )
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in ("a", "b", "A", "c")])
    for order, kept in ((["Copies", "Unique"], ["a", "b", "c"]), (["Unique", "Copies"], ["b", "c"])):
        filters = {name.lower(): {"kind": f"{own_filters}:{name}"} for name in order}
        config = load_filters(write_config(tmp_path / "c.yaml", filters=filters))
        filter_corpus(FilterOptions([source], tmp_path / order[0], config))
        assert kept_lines(tmp_path / order[0]) == [f'{{"text": "{text}"}}'.encode() for text in kept]


_MODULE = """
from steptron.data.filters import KEEP, FilterSettings, Verdict

class Fails:
    Settings = FilterSettings
    def __init__(self, settings): pass
    def judge(self, document): raise ValueError("model is missing")

class NoVerdict(Fails):
    def judge(self, document): return True

class NoFilter:
    Settings = FilterSettings
    def __init__(self, settings): pass

def no_settings(settings): return None
"""


@pytest.fixture
def broken_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "broken_filters_of_the_test"
    (tmp_path / f"{name}.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Fails", "filters.own: failed at {source}:1: ValueError: model is missing"),
        ("NoVerdict", "filters.own: judge returned True, not a Verdict"),
        ("NoFilter", "filters.own: {module}:NoFilter has no method judge"),
        ("no_settings", "{module}:no_settings has no Settings, a subclass of"),
        ("Absent", "{module}:Absent cannot be imported: module '{module}' has no attribute 'Absent'"),
    ],
)
def test_a_filter_that_does_not_work_is_named(tmp_path: Path, broken_filters: str, name: str, message: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    config = write_config(tmp_path / "c.yaml", filters={"own": {"kind": f"{broken_filters}:{name}"}})
    with pytest.raises((DataError, ConfigError)) as caught:
        filter_corpus(FilterOptions([source], tmp_path / "out", load_filters(config)))
    assert message.format(source=source, module=broken_filters) in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"lenght": {}}, "filters.lenght: 'lenght' is not a known kind of filter; did you mean length?"),
        ({"x": {"kind": "qqq"}}, "known: length, repetition, tags, decontamination, or package.module:Class"),
        ({"x": {"kind": "no.such:Thing"}}, "no.such:Thing cannot be imported: No module named 'no'"),
        ({"json": {"kind": "length"}}, "filters.json: cannot be the name of a filter"),
        ({"A": {"kind": "length"}}, "filters.A: cannot be the name of a filter"),
        (
            {"length": {"min_wrods": 3}},
            "filters.length.min_wrods is not a known key; did you mean filters.length.min_words",
        ),
        ({"length": {"min_words": "3"}}, "filters.length.min_words: '3' is not a whole number of at least 0 or null"),
        ({"length": 3}, "filters.length: 3 is not a mapping with keys kind, min_characters"),
        ({"repetition": {"top_ngrams": {2: 1.5}}}, "filters.repetition.top_ngrams.2: 1.5 is not a finite number"),
        ({"decontamination": {}}, "filters.decontamination.benchmarks is missing"),
        ({"length": None}, "filters: there is none; known kinds: length, repetition, tags, decontamination"),
        ({}, "filters: there is none"),
        (["length"], "filters takes a mapping from names to settings"),
    ],
)
def test_wrong_configurations(tmp_path: Path, filters: object, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"filters": filters}))
    with pytest.raises(ConfigError) as caught:
        load_filters(path)
    assert message in str(caught.value)


def test_files_that_build_on_others(tmp_path: Path) -> None:
    write_config(tmp_path / "base.yaml", filters={"tags": {}, "length": {"min_words": 3}, "repetition": {}})
    own = {"repetition": None, "length": {"max_words": 9}, "second": {"kind": "length"}}
    loaded = load_filters(write_config(tmp_path / "own.yaml", base="base.yaml", filters=own, text_field="content"))
    assert [spec.name for spec in loaded.filters] == ["tags", "length", "second"]
    assert (loaded.filters[1].settings.min_words, loaded.filters[1].settings.max_words) == (3, 9)  # type: ignore[attr-defined]
    assert (loaded.fields.text, loaded.fields.messages) == ("content", "messages")


def test_settings_that_cannot_be_honoured_are_found_before_work_starts(tmp_path: Path) -> None:
    config = load_filters(write_config(tmp_path / "c.yaml", filters={"length": {"min_words": 5, "max_words": 3}}))
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=r"filters\.length: min_words 5 is above max_words 3"):
        filter_corpus(FilterOptions([source], tmp_path / "out", config))


def test_every_setting_is_documented() -> None:
    from steptron.data.filters.benchmarks import BenchmarkSettings
    from steptron.data.filters.config import BUILT_IN, find_factory

    text = _DOCUMENTATION.read_text("utf-8")
    for kind, target in BUILT_IN.items():
        assert f"`{kind}`" in text
        for name in find_factory(target).Settings.model_fields:
            assert f"`{name}`" in text, (kind, name)
    assert all(f"`{name}`" in text for name in BenchmarkSettings.model_fields)
