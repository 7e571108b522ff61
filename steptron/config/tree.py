"""YAML as a tree that remembers where each value came from.

Scalars follow YAML 1.2's core schema, not PyYAML's YAML 1.1: ``1e-3`` is a number, ``no`` and ``on``
are text, ``010`` is ten. Keys given twice, tags (other than ``!replace``) and merge keys are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import yaml

Key = str | int
Scalar = str | int | float | bool | None

_TAG = "tag:yaml.org,2002:"
_REPLACE = "!replace"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


# Order matters: the first pattern that matches the whole scalar gives its type.
_SCALARS: tuple[tuple[str, re.Pattern[str], Callable[[str], Scalar]], ...] = (
    (f"{_TAG}null", _NULL, lambda text: None),
    (f"{_TAG}bool", _BOOL, lambda text: text.lower() == "true"),
    (f"{_TAG}int", _INT, lambda text: int(text, 16) if text.startswith("0x") else int(text)),
    (f"{_TAG}float", _FLOAT, _float),
)


class _Loader(yaml.SafeLoader):
    """Reads scalars by the patterns above alone."""


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
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        what = " ".join(part for part in (error.context, error.problem) if part)
        return Node({}, source_at(1)), [f"{source_at(line).detail}: not valid YAML: {what} (column {column})"]
    except yaml.YAMLError as error:
        return Node({}, source_at(1)), [f"{source_at(1).detail}: not valid YAML: {str(error).splitlines()[0]}"]
    if root is None:
        return Node(None, source_at(1)), []
    problems: list[str] = []
    node = _Converter(source_at, problems).convert(root, 1)
    return node, problems


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

    def convert(self, node: yaml.Node, line: int) -> Node:
        """``line`` is the line of the key or list item that holds the node."""
        source = self._source_at(line)
        if any(node is ancestor for ancestor in self._open):
            self._problem(line, "an alias refers to a mapping or list that contains it")
            return Node(None, source)
        self._open.append(node)
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
                return read(node.value)
        if node.tag != f"{_TAG}str":
            self._refuse_tag(node)
        return str(node.value)

    def _refuse_tag(self, node: yaml.Node) -> None:
        tag = node.tag.replace(_TAG, "!!")
        self._problem(node.start_mark.line + 1, f"tag {tag} is not allowed here; the only tag is !replace, on mappings")

    def _problem(self, line: int, what: str) -> None:
        self._problems.append(f"{self._source_at(line).detail}: {what}")
