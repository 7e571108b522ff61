from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptron.config import tree
from steptron.config.tree import Node, Source, dump_scalar, merge, parse


def read(text: str) -> tuple[object, list[str]]:
    node, problems = parse(text, lambda line: Source("file", "x.yaml", line))
    return node.plain(), problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("-1.5e+4", -15000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("0.5", 0.5),
        ("1_0.5", 10.5),
        ("-.inf", -math.inf),
        (".Inf", math.inf),
        ("+.INF", math.inf),
        ("3", 3),
        ("+3", 3),
        ("-3", -3),
        ("1_000", 1000),
        ("010", 10),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # Text, though YAML 1.1 would read a boolean, a sexagesimal number or a date.
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("1__0", "1__0"),
        ("'3'", "3"),
        ('"1e-3"', "1e-3"),
        ("e5", "e5"),
        ("{7: 1.0, a: [1, b]}", {7: 1.0, "a": [1, "b"]}),
        ("{a: &x {b: 1}, c: *x}", {"a": {"b": 1}, "c": {"b": 1}}),
    ],
)
def test_values(text: str, value: object) -> None:
    assert read(text) == (value, [])
    assert type(read(text)[0]) is type(value)


@pytest.mark.parametrize("text", [".nan", ".NaN", ".NAN"])
def test_nan(text: str) -> None:
    value, problems = read(text)
    assert isinstance(value, float) and math.isnan(value) and problems == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n  b: " + "9" * 5000, "x.yaml:2: whole numbers must be from -2^63 to 2^63 - 1"),
        ('a: 1\nb: "\\UFFFFFFFF"', "x.yaml:2: not valid YAML: "),
        ("a: 1\nb: " + "[" * 5000 + "]" * 5000, "x.yaml:2: too large: nested more than 64 levels deep (column 67)"),
        ("a: 1\n" + "[" * 5000, "x.yaml:2: "),
        # Ten lines of nine aliases each: 9^9 values.
        (
            "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)),
            "x.yaml:1: too large: more than 100,000 values (an alias counts as all that it stands for) (column 5)",
        ),
        # Few values, but every alias adds forty levels.
        (
            f"a0: &a0 {'[' * 40}1{']' * 40}\n"
            + "".join(f"a{n}: &a{n} {'[' * 40}*a{n - 1}{']' * 40}\n" for n in (1, 2)),
            "x.yaml:1: too large: nested more than 64 levels deep (column 32)",
        ),
    ],
    ids=["digits", "character", "depth", "open", "alias bomb", "alias depth"],
)
def test_what_no_configuration_needs_is_refused(text: str, problem: str) -> None:
    (found,) = read(text)[1]
    assert found.startswith(problem)


def test_the_largest_allowed_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MOST_VALUES", 100)
    assert read(f"[{', '.join('1' * 99)}]")[1] == []
    assert len(read(f"[{', '.join('1' * 100)}]")[1]) == 1
    assert read("[" * 64 + "]" * 64)[1] == []
    assert len(read("[" * 65 + "]" * 65)[1]) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "x.yaml:3: key 'a' is given twice; the first is in line 1"),
        ("a:\n  b: 1\n  b: 2", "x.yaml:3: key 'b' is given twice; the first is in line 2"),
        ("{7: 1, 7: 2}", "x.yaml:1: key 7 is given twice; the first is in line 1"),
        ("a: 1\ntrue: 2", "x.yaml:2: keys must be text or whole numbers"),
        ("1.5: 2", "x.yaml:1: keys must be text or whole numbers"),
        ("? [a]\n: 2", "x.yaml:1: keys must be text or whole numbers"),
        ("<<: {a: 1}", "x.yaml:1: merge keys (<<) are not supported; compose files with base:"),
        (
            "a: !!python/name:os.system ''",
            "x.yaml:1: tag !!python/name:os.system is not allowed here; the only tag is !replace, on mappings",
        ),
        ("a: !replace [1]", "x.yaml:1: tag !replace is not allowed here; the only tag is !replace, on mappings"),
        ("a: &x\n  b: *x", "x.yaml:2: an alias refers to a mapping or list that contains it"),
        (
            "a: 1\nb: [1, 2",
            "x.yaml:2: not valid YAML: while parsing a flow sequence expected ',' or ']', but got '<stream end>' "
            "(column 9)",
        ),
        (
            "a: 1\n---\nb: 2",
            "x.yaml:2: not valid YAML: expected a single document in the stream but found another document (column 1)",
        ),
    ],
)
def test_problems_name_the_line(text: str, problem: str) -> None:
    assert read(text)[1] == [problem]


def test_control_characters_are_refused() -> None:
    assert read("a: \x01")[1][0].startswith("x.yaml:1: not valid YAML: unacceptable character #x0001")


def test_every_problem_of_a_file_is_collected() -> None:
    assert len(read("a: 1\na: 2\nb: !!set {}\ntrue: 1")[1]) == 3


def test_sources_are_the_lines_of_the_keys() -> None:
    node, _ = parse("a:\n  b: 1\n  c:\n    - 2\n    - d: 3\n", lambda line: Source("file", "x.yaml", line))
    lines = {path: node.find(path).source.line for path in [("a",), ("a", "b"), ("a", "c"), ("a", "c", 0)]}  # type: ignore[union-attr]
    assert lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4}
    assert node.find(("a", "c", 1, "d")).source.line == 5  # type: ignore[union-attr]
    assert node.find(("a", "x")) is None and node.find(("a", "b", "x")) is None and node.find(("a", "c", 2)) is None


def _node(text: str) -> Node:
    return parse(text, lambda line: Source("file", "x.yaml", line))[0]


@pytest.mark.parametrize(
    ("under", "over", "merged"),
    [
        ("{a: {b: 1, c: 2}, d: 3}", "{a: {c: 4, e: 5}}", {"a": {"b": 1, "c": 4, "e": 5}, "d": 3}),
        ("{a: [1, 2, 3]}", "{a: [4]}", {"a": [4]}),
        ("{a: {b: 1}}", "{a: null}", {"a": None}),
        ("{a: null}", "{a: {b: 1}}", {"a": {"b": 1}}),
        ("{a: 1}", "{a: {b: 1}}", {"a": {"b": 1}}),
        ("{a: {7: 1, 8: 1}}", "{a: !replace {3: 1}}", {"a": {3: 1}}),
    ],
)
def test_merge(under: str, over: str, merged: object) -> None:
    assert merge(_node(under), _node(over)).plain() == merged


@given(
    st.one_of(
        st.text(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        st.none(),
        st.sampled_from(["1e-3", "yes", "null", "a: b", "x # y", "- a", "!x", "<<", "=", "1:30", "", " ", "~", "07"]),
    )
)
def test_dumped_scalars_read_back(value: str | float | None) -> None:
    text = dump_scalar(value)
    assert "\n" not in text
    back, problems = read(f"key: {text}  # comment")
    assert problems == [] and back == {"key": value} and type(back["key"]) is type(value)  # type: ignore[index]
