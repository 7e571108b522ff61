"""YAML as a tree that remembers where each value came from.

Scalars follow YAML 1.2's core schema, not PyYAML's YAML 1.1: ``1e-3`` is a number, ``no`` and ``on``
are text, ``010`` is ten. Keys given twice, tags (other than ``!replace``) and merge keys are refused, and so
is what no configuration needs: numbers beyond 64 bits, too many values and too deep nesting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Key = str | int
Scalar = str | int | float | bool | None

_TAG = "tag:yaml.org,2002:"
_REPLACE = "!replace"
# An alias stands for everything in its anchor, so that a few lines can hold more values than any memory.
MOST_VALUES = 100_000
DEEPEST = 64
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def _int(text: str) -> int:
    # By length first: Python refuses to convert very long numbers.
    value = (int(text, 16) if text.startswith("0x") else int(text)) if len(text) <= 100 else 2**63
    if not -(2**63) <= value < 2**63:
        raise ValueError("whole numbers must be from -2^63 to 2^63 - 1")
    return value


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


# Order matters: the first pattern that matches the whole scalar gives its type.
_SCALARS: tuple[tuple[str, re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (f"{_TAG}null", _NULL, lambda text: None),
    (f"{_TAG}bool", _BOOL, lambda text: text.lower() == "true"),
    (f"{_TAG}int", _INT, _int),
    (f"{_TAG}float", _FLOAT, _float),
)


class _TooLargeError(yaml.MarkedYAMLError):
    """Beyond what a configuration may hold."""


def _check_depth(depth: int, mark: yaml.Mark) -> None:
    if depth > DEEPEST:
        raise _TooLargeError(problem=f"nested more than {DEEPEST} levels deep", problem_mark=mark)


class _Loader(yaml.SafeLoader):
    """Reads scalars by the patterns above alone, and says where it is when Python itself refuses a text."""

    _depth = 0

    def get_single_node(self) -> yaml.Node | None:
        try:
            return super().get_single_node()
        except (ValueError, OverflowError) as error:  # such as the escape \UFFFFFFFF, which is no character
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=self.get_mark()) from error

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        _check_depth(self._depth, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as another type."""


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _ in _SCALARS:
    # PyYAML looks at the first character before it tries a pattern; None stands for "any".
    _whole = re.compile(f"(?:{_pattern.pattern})\\Z")
    _Loader.add_implicit_resolver(_tag, _whole, [None])
    _Dumper.add_implicit_resolver(_tag, _whole, [None])


@dataclass(frozen=True)
class Source:
    """Where a value came from. ``text`` is the override as given; ``line`` counts from 1."""

    kind: Literal["file", "override", "default"]
    file: str | None = None
    line: int | None = None
    text: str | None = None

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.file}:{self.line}"
        return self.kind

    @property
    def detail(self) -> str:
        """As ``str``, with the whole override."""
        return f"override {self.text}" if self.kind == "override" else str(self)


@dataclass(frozen=True)
class Node:
    """A value with its source; the values inside mappings and lists are nodes themselves.

    ``replace`` (the tag ``!replace``): take the mapping whole where it would be merged.
    """

    value: Scalar | dict[Key, Node] | list[Node]
    source: Source
    replace: bool = False

    def plain(self) -> object:
        """The bare value: scalars, dicts and lists."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, path: tuple[Key, ...]) -> Node | None:
        """The node at a path of keys and list indices, or None."""
        node: Node | None = self
        for step in path:
            if node is None:
                return None
            if isinstance(node.value, dict):
                node = node.value.get(step)
            elif isinstance(node.value, list) and isinstance(step, int) and 0 <= step < len(node.value):
                node = node.value[step]
            else:
                return None
        return node


def merge(under: Node, over: Node) -> Node:
    """Deep merge: mappings merge key by key, everything else (lists too) is replaced."""
    if over.replace or not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(under.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, over.source)


def parse(text: str, source_at: Callable[[int], Source]) -> tuple[Node, list[str]]:
    """Reads one YAML document.

    Args:
        text: the document; an empty one is null.
        source_at: the source of a line, counted from 1.

    Returns:
        The tree, and a list of problems (``source: what is wrong``). With problems the tree is partial.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
        problems: list[str] = []
        node = Node(None, source_at(1)) if root is None else _Converter(source_at, problems).convert(root, 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = " ".join(part for part in (error.context, error.problem) if part)
        kind = "too large" if isinstance(error, _TooLargeError) else "not valid YAML"
        return Node({}, source_at(1)), [f"{source_at(line).detail}: {kind}: {what} (column {column})"]
    except yaml.YAMLError as error:
        return Node({}, source_at(1)), [f"{source_at(1).detail}: not valid YAML: {str(error).splitlines()[0]}"]
    return node, problems


def dump(value: object) -> str:
    """A tree of plain values, and of paths, as YAML that `parse` reads back."""
    return str(yaml.dump(_without_paths(value), Dumper=_Dumper, sort_keys=False))


def _without_paths(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def dump_scalar(value: Scalar | list[object] | dict[object, object]) -> str:
    """A scalar, or an empty list or mapping, as one line of YAML that `parse` reads back."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, default_style=style, width=float("inf"), allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def children(value: object) -> Iterator[tuple[Key, object]]:
    """Items of a mapping, or indexed items of a list; nothing for scalars."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


class _Converter:
    """Turns PyYAML's node graph into a tree of `Node`."""

    def __init__(self, source_at: Callable[[int], Source], problems: list[str]) -> None:
        self._source_at = source_at
        self._problems = problems
        self._open: list[yaml.Node] = []
        self._count = 0

    def convert(self, node: yaml.Node, line: int) -> Node:
        """``line`` is the line of the key or list item that holds the node."""
        source = self._source_at(line)
        self._count += 1
        if self._count > MOST_VALUES:
            what = f"more than {MOST_VALUES:,} values (an alias counts as all that it stands for)"
            raise _TooLargeError(problem=what, problem_mark=node.start_mark)
        if any(node is ancestor for ancestor in self._open):
            self._problem(line, "an alias refers to a mapping or list that contains it")
            return Node(None, source)
        self._open.append(node)
        _check_depth(len(self._open), node.start_mark)
        try:
            if isinstance(node, yaml.MappingNode):
                replace = node.tag == _REPLACE
                if not replace and node.tag != f"{_TAG}map":
                    self._refuse_tag(node)
                return Node(self._mapping(node), source, replace)
            if isinstance(node, yaml.SequenceNode):
                if node.tag != f"{_TAG}seq":
                    self._refuse_tag(node)
                return Node([self.convert(item, item.start_mark.line + 1) for item in node.value], source)
            return Node(self._scalar(node), source)
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode) -> dict[Key, Node]:
        values: dict[Key, Node] = {}
        lines: dict[Key, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if isinstance(key, bool) or not isinstance(key, str | int):
                self._problem(line, "keys must be text or whole numbers")
                continue
            if key == "<<" and key_node.style is None:
                self._problem(line, "merge keys (<<) are not supported; compose files with base:")
                continue
            if key in lines:
                self._problem(line, f"key {key!r} is given twice; the first is in line {lines[key]}")
                continue
            lines[key] = line
            values[key] = self.convert(value_node, line)
        return values

    def _scalar(self, node: yaml.Node) -> Scalar:
        for tag, pattern, read in _SCALARS:
            if node.tag == tag and pattern.fullmatch(node.value):
                try:
                    return read(node.value)
                except ValueError as error:
                    self._problem(node.start_mark.line + 1, str(error))
                    return None
        if node.tag != f"{_TAG}str":
            self._refuse_tag(node)
        return str(node.value)

    def _refuse_tag(self, node: yaml.Node) -> None:
        tag = node.tag.replace(_TAG, "!!")
        self._problem(node.start_mark.line + 1, f"tag {tag} is not allowed here; the only tag is !replace, on mappings")

    def _problem(self, line: int, what: str) -> None:
        self._problems.append(f"{self._source_at(line).detail}: {what}")
