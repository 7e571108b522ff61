"""Loads a configuration: YAML files that compose, then overrides, then the typed tree.

A file may name others under ``base:`` (one path or a list, relative to the file). Later bases win
over earlier ones, and the file itself over all of them: mappings merge key by key, everything else
is replaced. The tag ``!replace`` in front of a mapping takes it whole instead of merging it. Paths in
``data`` and ``train.output`` are relative to the current working directory, not to the file.

An override is ``dotted.key=value`` with the value in YAML; list items are named by index
(``data.train.0.weight=2``), and a mapping or list given as a value replaces the old one whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from steptron.config.problems import describe, dotted
from steptron.config.schema import PretrainConfig, Section, names_file
from steptron.config.tree import DEEPEST, Key, Node, Source, children, dump, merge, parse
from steptron.errors import ConfigError

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class Loaded:
    """A configuration, and where each of its values came from, by dotted key (``data.train.0.path``)."""

    config: PretrainConfig
    sources: Mapping[str, Source]


def load(file: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a file with its bases, applies overrides and validates the result.

    Args:
        file: YAML file.
        overrides: ``dotted.key=value``; later ones win.

    Raises:
        ConfigError: lists every unreadable file, unknown key, wrong value and bad override found,
            each with its file and line.
    """
    config, tree = _load(file, PretrainConfig, overrides)
    return Loaded(config, dict(_sources(config.model_dump(), tree, ())))


def load_section(file: Path, schema: type[AnySection]) -> AnySection:
    """Reads a file that holds another tree than a whole configuration.

    Raises:
        ConfigError: as in ``load``.
    """
    return _load(file, schema, ())[0]


def with_overrides(config: AnySection, overrides: Sequence[str], title: str) -> AnySection:
    """A copy of a tree of values with overrides applied.

    Args:
        config: the tree.
        overrides: ``dotted.key=value``; later ones win.
        title: what the values belong to, for the message.

    Raises:
        ConfigError: lists every bad override, unknown key and wrong value.
    """
    source = Source("file", title)
    tree, problems = parse(dump(config.model_dump()), lambda line: source)
    return _validated(tree, type(config), overrides, title, problems)[0]


def _load(file: Path, schema: type[AnySection], overrides: Sequence[str]) -> tuple[AnySection, Node]:
    reader = _Reader()
    tree = reader.compose(Path(file), ())
    if reader.file_problems:
        _, bad = _overridden(tree, overrides)
        raise ConfigError(str(file), reader.file_problems + bad)
    return _validated(tree, schema, overrides, str(file), [])


def _validated(
    tree: Node, schema: type[AnySection], overrides: Sequence[str], title: str, problems: list[str]
) -> tuple[AnySection, Node]:
    tree, bad = _overridden(tree, overrides)
    problems = problems + bad
    try:
        config = schema.model_validate(tree.plain())
    except ValidationError as error:
        raise ConfigError(title, problems + describe(error, schema, tree)) from None
    if problems:
        raise ConfigError(title, problems)
    return config, tree


def _overridden(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[str]]:
    """The tree with those overrides that can be applied, and what is wrong with the others."""
    problems = []
    for text in overrides:
        try:
            tree = _override(tree, text)
        except _BadOverride as error:
            problems.append(str(error))
    return tree, problems


# ------------------------------------------------------------------------------------------ files


@dataclass
class _Reader:
    """Reads files and what they build on; collects what is wrong with them."""

    file_problems: list[str] = field(default_factory=list)
    _composed: dict[Path, Node] = field(default_factory=dict)

    def compose(self, file: Path, chain: tuple[Path, ...]) -> Node:
        """The tree of a file over its bases. ``chain``: the files that led here, outermost first."""
        # Each file once: bases that share bases would otherwise be read in every combination. (A link to a
        # file elsewhere is another file: its bases are relative to the link.)
        key = _real(file.parent) / file.name
        if key not in self._composed:
            self._composed[key] = self._compose(file, chain)
        return self._composed[key]

    def _compose(self, file: Path, chain: tuple[Path, ...]) -> Node:
        own = self._read(file)
        if not isinstance(own.value, dict):
            return own
        values = dict(own.value)
        tree = Node({}, own.source)
        for base in self._bases(values.pop("base", None)):
            path = file.parent / str(base.value)
            chain_text = " -> ".join(map(_shown_path, (*chain, file, path)))
            if any(_real(path) == _real(other) for other in (*chain, file)):
                self.file_problems.append(f"{base.source}: the file builds on itself: {chain_text}")
            elif not os.path.isfile(path):  # Path.is_file raises for some names, such as too long ones
                self.file_problems.append(f"{base.source}: base {_shown_path(path)} does not exist ({chain_text})")
            else:
                tree = merge(tree, self.compose(path, (*chain, file)))
        return merge(tree, Node(values, own.source))

    def _read(self, file: Path) -> Node:
        """The mapping in a file; an empty one after a problem."""
        shown = _shown_path(file)
        empty = Node({}, Source("file", shown, 1))
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            self.file_problems.append(f"{shown}: not UTF-8 text: byte {error.start} cannot be decoded")
            return empty
        except OSError as error:
            self.file_problems.append(f"{shown}: cannot be read: {error.strerror}")
            return empty
        node, problems = parse(text, lambda line: Source("file", shown, line))
        self.file_problems += problems
        if node.value is None:
            return empty
        if not isinstance(node.value, dict):
            self.file_problems.append(f"{node.source}: a configuration file holds a mapping with keys such as model:")
            return empty
        return node

    def _bases(self, node: Node | None) -> list[Node]:
        if node is None:
            return []
        bases = node.value if isinstance(node.value, list) else [node]
        for base in bases:
            if not _is_path(base):
                self.file_problems.append(f"{base.source}: base: takes a path or a list of paths")
        return [base for base in bases if _is_path(base)]


def _is_path(node: Node) -> bool:
    return isinstance(node.value, str) and names_file(node.value)


def _real(path: Path) -> Path:
    """The path without links; Path.resolve raises where they go in a circle."""
    return Path(os.path.realpath(path))


def _shown_path(path: Path) -> str:
    """Relative to the working directory when inside it."""
    resolved, here = _real(path), Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(resolved)


# -------------------------------------------------------------------------------------- overrides


class _BadOverride(Exception):
    pass


def _override(tree: Node, text: str) -> Node:
    name, equals, value_text = text.partition("=")
    source = Source("override", text=text)
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise _BadOverride(f"override {text}: expected dotted.key=value, for example train.steps=100")
    if len(path) > DEEPEST:
        raise _BadOverride(f"override {text}: the key is more than {DEEPEST} levels deep")
    value, problems = parse(value_text, lambda line: source)
    if problems:
        raise _BadOverride("; ".join(problems))
    return _assign(tree, path, value, source, ())


def _assign(node: Node, path: tuple[str, ...], value: Node, source: Source, above: tuple[Key, ...]) -> Node:
    """A copy of the tree with ``value`` at ``path``; mappings on the way are made where there are none."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(node.value, list):
        index = _key(head)
        if not isinstance(index, int) or index >= len(node.value):
            raise _BadOverride(
                f"{source.detail}: {dotted(above)} is a list of {len(node.value)} [{node.source.detail}]; "
                f"{head!r} is not one of its indices (from 0)"
            )
        item = _assign(node.value[index], rest, value, source, (*above, index))
        return Node([*node.value[:index], item, *node.value[index + 1 :]], node.source)
    if node.value is not None and not isinstance(node.value, dict):
        raise _BadOverride(
            f"{source.detail}: {dotted(above)} is the single value {node.value!r} [{node.source.detail}]; "
            f"it has no key {head!r}"
        )
    values = node.value or {}
    key = _key(head)
    child = values.get(key, Node(None, source))
    return Node({**values, key: _assign(child, rest, value, source, (*above, key))}, node.source)


def _key(step: str) -> Key:
    """Fields never look like numbers, so a number is an index, or a key of a mapping such as clamp.routed."""
    return int(step) if step.isdecimal() and len(step) < 19 else step


# ---------------------------------------------------------------------------------------- sources


def _sources(value: object, tree: Node, path: tuple[Key, ...]) -> list[tuple[str, Source]]:
    """Dotted key and source of every single value (and empty mapping or list) of a configuration."""
    items = list(children(value))
    if not items:
        node = tree.find(path)
        return [(dotted(path), node.source if node is not None else Source("default"))]
    return [entry for key, inner in items for entry in _sources(inner, tree, (*path, key))]
