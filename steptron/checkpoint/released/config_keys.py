"""Typed access to the keys of a config.json that collects everything that is wrong instead of stopping at the first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

LARGEST = 2**31 - 1
"""Largest size (steptron.config.schema.Size)."""


@dataclass
class ConfigKeys:
    """The keys of one config.json.

    Every reader returns None after adding to ``problems``, so that what depends on the value can be left out.

    Attributes:
        values: the content, by the release's key names.
        names: what the file calls a key where that is another name.
        problems: one line for each thing to mend, by the name in the file.
    """

    values: Mapping[str, object]
    names: Mapping[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def name(self, key: str) -> str:
        return self.names.get(key, key)

    def refuse(self, key: str, expected: str) -> None:
        """Adds that a key is missing or has another value than ``expected``."""
        if key in self.values:
            self.problems.append(f"{self.name(key)} is {shown(self.values[key])}: it must be {expected}")
        else:
            self.problems.append(f"{self.name(key)} is missing: it must be {expected}")

    def exactly(self, key: str, expected: object, why: str, *, optional: bool = False) -> None:
        """Refuses any other value than ``expected``; an optional key may be absent or null."""
        value = self.values.get(key)
        if optional and value is None:
            return
        if type(value) is not type(expected) or value != expected:
            self.refuse(key, f"{shown(expected)}: {why}")

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if isinstance(value, bool):
            return value
        self.refuse(key, "true or false")
        return None

    def whole(self, key: str, least: int = 1, most: int = LARGEST) -> int | None:
        number = whole_number(self.values.get(key))
        if number is not None and least <= number <= most:
            return number
        self.refuse(key, f"a whole number from {least} to {most}")
        return None

    def positive(self, key: str) -> float | None:
        number = finite_number(self.values.get(key))
        if number is not None and number > 0:
            return number
        self.refuse(key, "a finite number greater than 0")
        return None

    def items(self, key: str, lengths: Sequence[int], why: str) -> list[object] | None:
        """A list of one of the given lengths."""
        value = self.values.get(key)
        if isinstance(value, list) and len(value) in lengths:
            return value
        self.refuse(key, f"a list of {' or '.join(map(str, dict.fromkeys(lengths)))} ({why})")
        return None

    def refuse_items(self, key: str, wrong: Mapping[int, object], expected: str) -> None:
        """Adds which items of a list are wrong: the first one by value, the others by number."""
        if not wrong:
            return
        first, *others = wrong
        also = f" (so are {', '.join(map(str, others))})" if others else ""
        self.problems.append(f"{self.name(key)}[{first}] is {shown(wrong[first])}{also}: it must be {expected}")


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite_number(value: object) -> float | None:
    """The number as a float; None for anything else, infinities and NaN."""
    if not is_number(value):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole_number(value: object) -> int | None:
    """The whole number, which may be stored as a float such as 64.0; None for anything else."""
    number = finite_number(value)
    if number is None or not number.is_integer():
        return None
    return int(value)  # type: ignore[call-overload]  # of the value itself: large integers are no exact floats


def layer_numbers(value: object) -> list[int] | None:
    """Layers named as in ``moe_layers_enum``: "3,4,5", or a list of numbers from 0; None for anything else."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")] if value.strip() else []
        return [int(part) for part in parts] if all(part.isdecimal() and len(part) < 10 for part in parts) else None
    if not isinstance(value, list):
        return None
    numbers = [whole_number(item) for item in value]
    found = [number for number in numbers if number is not None and number >= 0]
    return found if len(found) == len(numbers) else None


def shown(value: Any) -> str:
    """A value as it stands in the file; long ones by their size."""
    if isinstance(value, dict) and value:
        return f"a mapping with {', '.join(map(str, value))}"
    if isinstance(value, list) and len(value) > 4:
        return f"a list of {len(value)}"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
