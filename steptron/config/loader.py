"""Loads a configuration: YAML files that compose, then overrides, then the typed tree.

A file may name others under ``base:`` (one path or a list, relative to the file). Later bases win
over earlier ones, and the file itself over all of them: mappings merge key by key, everything else
is replaced. The tag ``!replace`` in front of a mapping takes it whole instead of merging it. Paths in
``data`` and ``train.output`` are relative to the current working directory, not to the file.

A file may list ``stages:``, the parts of a run one after the other. Each has a name and a budget of tokens or epochs
(``StageConfig``), and its own ``model``, ``balance``, ``loss``, ``data``, ``optimizer`` and ``train`` on top of the
file's.

An override is ``dotted.key=value`` with the value in YAML; list items are named by index
(``data.train.0.weight=2``), and a mapping or list given as a value replaces the old one whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from steptron.config.problems import describe, dotted
from steptron.config.schema import PretrainConfig, Section, StageConfig, names_file
from steptron.config.stages import Curriculum, Stage
from steptron.config.tree import DEEPEST, Key, Node, Source, children, dump, merge, parse
from steptron.errors import ConfigError, UserError

AnySection = TypeVar("AnySection", bound=Section)


@dataclass(frozen=True)
class Loaded:
    """A run's configuration, and where its values came from.

    Attributes:
        curriculum: its stages; one where it has none.
        sources: for each stage where each value came from, by dotted key (``data.train.0.path``).
    """

    curriculum: Curriculum
    sources: tuple[Mapping[str, Source], ...]

    @property
    def config(self) -> PretrainConfig:
        """That of the first stage: what stages cannot differ in is that of all."""
        return self.curriculum.stages[0].config

    def stage(self, name: str | None) -> Stage:
        """The stage of a name, the first one without.

        Raises:
            UserError: there is none of that name.
        """
        return self.curriculum.stages[0] if name is None else self.through(name).stages[-1]

    def through(self, name: str | None) -> Curriculum:
        """The run up to the end of a stage, the whole run without.

        Raises:
            UserError: there is no stage of that name.
        """
        try:
            return self.curriculum if name is None else self.curriculum.through(name)
        except KeyError as error:
            raise UserError(str(error.args[0])) from None


def load(file: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Reads a file with its bases, applies overrides and validates the result.

    Args:
        file: YAML file.
        overrides: ``dotted.key=value``; later ones win.

    Raises:
        ConfigError: lists every unreadable file, unknown key, wrong value and bad override found,
            each with its file and line.
    """
    tree, problems = _composed(file, overrides)
    if isinstance(tree.value, dict) and "stages" in tree.value:
        return _load_stages(tree, str(file), problems)
    config = _validated(tree, PretrainConfig, str(file), problems)
    return Loaded(Curriculum.of(config), (_sources_of(config, tree),))


def has_stages(file: Path) -> bool:
    """Whether a file, or a base of it, lists stages.

    Raises:
        ConfigError: files cannot be read.
    """
    return _composed(file, ())[0].find(("stages",)) is not None


def load_section(file: Path, schema: type[AnySection]) -> AnySection:
    """Reads a file that holds another tree than a whole configuration.

    Raises:
        ConfigError: as in ``load``.
    """
    return _validated(_composed(file, ())[0], schema, str(file), [])


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
    tree, bad = _overridden(tree, overrides)
    return _validated(tree, type(config), title, problems + bad)


def _composed(file: Path, overrides: Sequence[str]) -> tuple[Node, list[str]]:
    """The tree of a file with its bases and overrides, and what is wrong with the overrides.

    Raises:
        ConfigError: files cannot be read.
    """
    reader = _Reader()
    tree, bad = _overridden(reader.compose(Path(file), ()), overrides)
    if reader.file_problems:
        raise ConfigError(str(file), reader.file_problems + bad)
    return tree, bad


def _validated(tree: Node, schema: type[AnySection], title: str, problems: list[str]) -> AnySection:
    try:
        config = schema.model_validate(tree.plain())
    except ValidationError as error:
        raise ConfigError(title, problems + describe(error, schema, tree)) from None
    if problems:
        raise ConfigError(title, problems)
    return config


def _overridden(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[str]]:
    """The tree with those overrides that can be applied, and what is wrong with the others."""
    problems = []
    for text in overrides:
        try:
            tree = _override(tree, text)
        except _BadOverride as error:
            problems.append(str(error))
    return tree, problems


# ----------------------------------------------------------------------------------------- stages

_STAGE_SECTIONS = ("model", "balance", "loss", "data", "optimizer", "train")


def _load_stages(tree: Node, title: str, problems: list[str]) -> Loaded:
    """A run of several stages."""
    assert isinstance(tree.value, dict)
    base = dict(tree.value)
    listed = base.pop("stages")
    if not isinstance(listed.value, list) or not listed.value:
        raise ConfigError(title, [*problems, f"stages takes a list of stages, one at least [{listed.source.detail}]"])
    if (steps := tree.find(("train", "steps"))) is not None:
        problems.append(
            f"train.steps: a run with stages ends with the tokens of the last one: leave it out [{steps.source.detail}]"
        )
    parts: list[tuple[StageConfig, PretrainConfig]] = []
    trees = []
    for number, item in enumerate(listed.value):
        try:
            head, own = _stage_parts(number, item, title)
            # How many steps a stage has follows from its other settings.
            own = merge(own, _single(("train", "steps"), Node(1, item.source)))
            trees.append(merge(Node(base, tree.source), own))
            config = _validated(trees[-1], PretrainConfig, title, [])
            parts.append((_counted(number, head, config, title), config))
        except ConfigError as error:
            problems += [text for text in error.problems if text not in problems]
    if problems:
        raise ConfigError(title, problems)
    try:
        curriculum = Curriculum.joined(parts)
    except ValueError as error:  # also of a ramp that does not lead to its batch size
        raise ConfigError(title, [str(error)]) from None
    if wrong := list(curriculum.problems()):
        raise ConfigError(title, wrong)
    sources = (_sources_of(stage.config, own) for stage, own in zip(curriculum.stages, trees, strict=True))
    return Loaded(curriculum, tuple(sources))


def _single(path: tuple[Key, ...], node: Node) -> Node:
    """A tree with nothing but a node at a path."""
    for step in reversed(path):
        node = Node({step: node}, node.source)
    return node


def _stage_parts(number: int, item: Node, title: str) -> tuple[StageConfig, Node]:
    """What a stage is, and the settings of its own."""
    if not isinstance(item.value, dict):
        raise ConfigError(title, [f"stages.{number} takes name, tokens and settings [{item.source.detail}]"])
    own: dict[Key, Node] = {}
    rest: dict[Key, Node] = {}
    for key, child in item.value.items():
        (own if key in _STAGE_SECTIONS else rest)[key] = child
    head = Node(rest, item.source)
    try:
        stage = StageConfig.model_validate(head.plain())
    except ValidationError as error:
        lines = describe(error, StageConfig, head)
        raise ConfigError(title, [f"stages.{number}.{line}" for line in lines]) from None
    if (stage.tokens is None) == (stage.epochs is None):
        raise ConfigError(
            title, [f"stages.{number} takes either tokens or epochs as its budget [{item.source.detail}]"]
        )
    return stage, Node(own, item.source)


def _counted(number: int, stage: StageConfig, config: PretrainConfig, title: str) -> StageConfig:
    """The stage with its budget in tokens: how many an epoch has is known to the data alone."""
    if stage.epochs is None:
        return stage
    from steptron.data.errors import DataError
    from steptron.data.sources import open_source

    try:
        samples = open_source(config.data.train, "train", config.data).samples_per_epoch
    except DataError as error:
        raise ConfigError(title, [f"stages.{number}.epochs: an epoch cannot be counted: {error}"]) from None
    return stage.model_copy(update={"tokens": math.ceil(stage.epochs * samples) * config.data.sequence_length})


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


def _sources_of(config: PretrainConfig, tree: Node) -> dict[str, Source]:
    return dict(_sources(config.model_dump(), tree, ()))


def _sources(value: object, tree: Node, path: tuple[Key, ...]) -> list[tuple[str, Source]]:
    """Dotted key and source of every single value (and empty mapping or list) of a configuration."""
    items = list(children(value))
    if not items:
        node = tree.find(path)
        return [(dotted(path), node.source if node is not None else Source("default"))]
    return [entry for key, inner in items for entry in _sources(inner, tree, (*path, key))]
