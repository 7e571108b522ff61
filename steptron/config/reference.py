"""Every field of the configuration as the schema has it: name, values, default, description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from steptron.config.schema import Section
from steptron.config.tree import dump_scalar

REQUIRED = "required"
_TYPES: dict[object, str] = {bool: "bool", int: "int", float: "float", str: "text", Path: "path", NoneType: "null"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_LENGTHS = {"min_length": "at least {} item{}", "max_length": "at most {} item{}"}


@dataclass(frozen=True)
class FieldReference:
    """One field.

    Attributes:
        name: dotted; ``.N`` stands for the number of a list item.
        values: type and bounds, such as ``int > 0 and <= 100`` or ``adamw | sgd``; "section" for a field
            that holds others.
        default: in YAML; ``required`` without one. Empty for a section whose fields all have defaults.
        description: one line.
    """

    name: str
    values: str
    default: str
    description: str


def field_references(schema: type[Section], prefix: str = "") -> Iterator[FieldReference]:
    """Every field of a section and of the sections inside it, in the schema's order.

    Args:
        schema: the section.
        prefix: dotted name of the section, put before its fields' names.
    """
    for key, field in schema.model_fields.items():
        name = f"{prefix}.{key}" if prefix else key
        yield FieldReference(
            name,
            _values(field.annotation, field.metadata),
            _default(field),
            " ".join((field.description or "").split()),
        )
        for path, inner in _sections(field.annotation, name):
            yield from field_references(inner, path)


def is_below(name: str, prefix: str) -> bool:
    """Whether a field is the one that a prefix names, or below it; a list item may be given by number or as ``N``."""
    wanted = ["N" if step.isdecimal() else step for step in prefix.split(".")]
    return name.split(".")[: len(wanted)] == wanted


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, each as given."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _sections(annotation: Any, name: str) -> Iterator[tuple[str, type[Section]]]:
    for member in _members(annotation):
        if _is_section(member):
            yield name, member
        elif get_origin(member) is list:
            yield from _sections(get_args(member)[0], f"{name}.N")


def _values(annotation: Any, metadata: list[Any]) -> str:
    return " | ".join(_member_values(member, metadata) for member in _members(annotation))


def _member_values(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        inner, *own = get_args(annotation)
        return _member_values(inner, [*metadata, *own])
    if _is_section(annotation):
        return "section"
    if get_origin(annotation) is Literal:
        return " | ".join(dump_scalar(value) for value in get_args(annotation))
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        return ", ".join([f"list of {_plural(_values(item, []))}", *_limits(metadata, _LENGTHS)])
    if get_origin(annotation) is dict:
        key, value = get_args(annotation)
        return f"mapping of {_values(key, [])} to {_values(value, [])}"
    limits = [] if annotation is NoneType else _limits(metadata, _BOUNDS)
    return f"{_TYPES[annotation]} {' and '.join(limits)}" if limits else _TYPES[annotation]


def _plural(values: str) -> str:
    return f"{values}s" if values == "section" else values


def _limits(metadata: list[Any], words: dict[str, str]) -> list[str]:
    constraints = [inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])]
    limits = []
    for name, word in words.items():
        for bound in (getattr(item, name) for item in constraints if getattr(item, name, None) is not None):
            number = f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
            limits.append(word.format(number, "" if bound == 1 else "s") if "{}" in word else f"{word} {number}")
    return limits


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, Section) else dump_scalar(value)
