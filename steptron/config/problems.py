"""Says what pydantic found wrong in the words of a configuration file: key, value, what would be right, where."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from steptron.config.schema import Section
from steptron.config.tree import Key, Node, dump_scalar

_BOUNDS = {"gt": "greater than", "ge": "of at least", "lt": "less than", "le": "of at most"}
_NAMES: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    Path: "a non-empty path that a file can have",
    types.NoneType: "null",
}


def dotted(path: Iterable[Key]) -> str:
    """A path of keys and indices as it is written in overrides."""
    return ".".join(str(step) for step in path)


def describe(error: ValidationError, schema: type[Section], tree: Node) -> list[str]:
    """One line for each thing that pydantic refused.

    Args:
        error: the refusal of ``tree.plain()`` by ``schema``.
        schema: the section at the root of the tree.
        tree: where each value came from.
    """
    lines = []
    for item in error.errors():
        path = item["loc"]
        if item["type"] in ("extra_forbidden", "invalid_key"):
            lines.append(_unknown_key(path, schema, tree))
        elif item["type"] == "missing":
            lines.append(_missing(path, schema, tree))
        elif path[-1] == "[key]":
            lines.append(_wrong_key(path[:-1], schema, tree))
        else:
            lines.append(_wrong_value(path, item["input"], schema, tree))
    return lines


def known_keys(schema: type[Section], prefix: tuple[Key, ...] = ()) -> Iterator[tuple[Key, ...]]:
    """Every key of a section and of the sections inside it; list items are written as index 0."""
    for name, field in schema.model_fields.items():
        path: tuple[Key, ...] = (*prefix, name)
        yield path
        for alternative in _alternatives(field.annotation):
            if get_origin(alternative) is list:
                alternative, path = get_args(alternative)[0], (*path, 0)
            if _is_section(alternative):
                yield from known_keys(alternative, path)


def _unknown_key(path: tuple[Key, ...], schema: type[Section], tree: Node) -> str:
    *parents, name = path
    slot = _slot(schema, parents)
    siblings = next(list(item.model_fields) for item in _alternatives(slot.annotation) if _is_section(item))
    close = [dotted((*parents, match)) for match in difflib.get_close_matches(str(name), siblings, n=2)]
    elsewhere = [dotted(other) for other in known_keys(schema) if other[-1] == name]
    if path == ("base",):
        hint = "base: stands at the top of a file and is not an override"
    elif close or elsewhere:
        hint = f"did you mean {' or '.join(dict.fromkeys(close + elsewhere))}?"
    else:
        hint = f"known keys here: {', '.join(siblings)}"
    return f"{dotted(path)} is not a known key; {hint} [{_nearest_source(tree, path)}]"


def _missing(path: tuple[Key, ...], schema: type[Section], tree: Node) -> str:
    slot = _slot(schema, path)
    return f"{dotted(path)} is missing: {slot.description}; expected {slot.expected} [{_nearest_source(tree, path)}]"


def _wrong_key(path: tuple[Key, ...], schema: type[Section], tree: Node) -> str:
    *parents, key = path
    slot = _slot(schema, parents)
    keys = next(get_args(item)[0] for item in _alternatives(slot.annotation) if get_origin(item) is dict)
    where = _nearest_source(tree, path)
    return f"{dotted(parents)}: the key {key!r} is not {_expected(keys, ())} ({slot.description}) [{where}]"


def _wrong_value(path: tuple[Key, ...], value: object, schema: type[Section], tree: Node) -> str:
    slot = _slot(schema, path)
    where = _nearest_source(tree, path)
    return f"{dotted(path)}: {_shown(value)} is not {slot.expected} ({slot.description}) [{where}]"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return f"a mapping with keys {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return dump_scalar(value)  # type: ignore[arg-type]


def _nearest_source(tree: Node, path: Sequence[Key]) -> str:
    """The source of a value, or of the innermost section that could have held it."""
    node = tree
    for length in range(1, len(path) + 1):
        inner = tree.find(tuple(path[:length]))
        if inner is None:
            break
        node = inner
    return node.source.detail


# ------------------------------------------------------------------------------ reading the schema


@dataclass(frozen=True)
class _Slot:
    """What the schema says about one place: its type, bounds and description."""

    annotation: Any
    bounds: tuple[Any, ...]
    description: str | None

    @property
    def expected(self) -> str:
        return _expected(self.annotation, self.bounds)


def _slot(schema: type[Section], path: Sequence[Key]) -> _Slot:
    slot = _Slot(schema, (), "the configuration")
    for step in path:
        slot = next(inner for item in _alternatives(slot.annotation) if (inner := _inner_slot(item, step, slot)))
    return slot


def _inner_slot(annotation: Any, step: Key, outer: _Slot) -> _Slot | None:
    if _is_section(annotation):
        field = annotation.model_fields[step]
        return _Slot(field.annotation, tuple(field.metadata), field.description)
    if get_origin(annotation) in (list, dict):
        return _Slot(get_args(annotation)[-1], (), outer.description)
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Members of a union, without Annotated; the type itself otherwise."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def _expected(annotation: Any, bounds: Sequence[Any]) -> str:
    """The values that a type accepts, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _expected(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(member, bounds) for member in arguments)
    if origin is Literal:
        return " or ".join(arguments)
    if origin is dict:
        return f"a mapping from {_expected(arguments[0], ())} to {_expected(arguments[1], ())}"
    if origin is list:
        least = "".join(f" of at least {length}" for length in _bound_values(bounds, "min_length"))
        return f"a list{least}, each item {_expected(arguments[0], ())}"
    if _is_section(annotation):
        return f"a mapping with keys {', '.join(annotation.model_fields)}"
    limits = [f"{text} {bound}" for name, text in _BOUNDS.items() for bound in _bound_values(bounds, name)]
    return " ".join([_NAMES[annotation], " and ".join(limits)]) if limits else _NAMES[annotation]


def _bound_values(bounds: Sequence[Any], name: str) -> Iterator[Any]:
    for bound in bounds:
        for item in bound.metadata if isinstance(bound, FieldInfo) else (bound,):
            if hasattr(item, name):
                yield getattr(item, name)
