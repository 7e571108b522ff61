"""Attention layouts: which kind of attention each layer has, from one string."""

from __future__ import annotations

import re
from enum import StrEnum

_LAYOUT = re.compile(r"(?P<pattern>F+|S\d+F\d+)(?P<options>(?:\+(?:heads|gate|sink))*)")


class AttentionKind(StrEnum):
    FULL = "full"
    SLIDING = "sliding"


def parse_layout(layout: str) -> tuple[tuple[AttentionKind, ...], frozenset[str]]:
    """Reads a layout string such as ``S3F1+heads+gate``.

    The pattern repeats after one leading full layer (S3F1: full, then three sliding and one full,
    again and again). ``+heads`` gives sliding layers their own head count (otherwise the full
    layers'), ``+gate`` adds the head-wise gate, ``+sink`` a learned sink per head.

    Returns:
        The repeating attention kinds, and the set of options.

    Raises:
        ValueError: the string has another form.
    """
    match = _LAYOUT.fullmatch(layout)
    if match is None:
        raise ValueError(
            f"layout {layout!r} is not understood: expected FFFF, S1F1 or S3F1 (any S<n>F<m>), "
            "followed by any of +heads, +gate, +sink"
        )
    options = [option for option in match["options"].split("+") if option]
    if len(options) != len(set(options)):
        raise ValueError(f"layout {layout!r} names an option twice")
    pattern = match["pattern"]
    if pattern.startswith("F"):
        return (AttentionKind.FULL,), frozenset(options)
    sliding, full = (int(count) for count in re.findall(r"\d+", pattern))
    if sliding == 0 or full == 0:
        raise ValueError(f"layout {layout!r}: counts must be at least 1 (use FFFF for full attention everywhere)")
    return (AttentionKind.SLIDING,) * sliding + (AttentionKind.FULL,) * full, frozenset(options)
