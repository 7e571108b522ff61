"""What differs between two trees of values."""

from __future__ import annotations

from collections.abc import Iterator


def differences(before: object, now: object, key: str = "") -> Iterator[tuple[str, object, object]]:
    """Dotted key and both values of everything that differs; mappings are compared key by key, the rest as a whole."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys(), key=str):
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else str(name))
    elif before != now:
        yield key, before, now
