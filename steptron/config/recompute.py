"""Which layers a rule of ``train.recompute`` names, and what is recomputed in a layer that several rules name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from steptron.config.layout import AttentionKind
from steptron.config.schema import RecomputePart, RecomputeRuleConfig

_WORDS = ("all", "full", "sliding", "dense", "moe", "mtp")
_NUMBERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class NamedLayer:
    """What a rule can name a layer by.

    Attributes:
        number: of a decoder layer, from 0; None for an MTP depth.
        kind: of its attention.
        moe: whether its feed-forward is a mixture of experts.
    """

    number: int | None
    kind: AttentionKind
    moe: bool


@dataclass(frozen=True)
class Selector:
    """One item of a rule's ``layers``: a word, or decoder layers ``first`` to ``last``."""

    text: str
    first: int | None = None
    last: int | None = None

    def names(self, layer: NamedLayer) -> bool:
        """Whether the layer is meant; MTP depths are sliding and dense layers too, but have no number."""
        if self.first is not None and self.last is not None:
            return layer.number is not None and self.first <= layer.number <= self.last
        return self.text in {
            "all",
            layer.kind.value,
            "moe" if layer.moe else "dense",
            *(("mtp",) if layer.number is None else ()),
        }


def parse_layers(text: str) -> list[Selector]:
    """Reads ``layers`` of a rule: items separated by commas, each a word or decoder layers such as 3 or 0-3.

    Raises:
        ValueError: says which item cannot be read and what would be right.
    """
    return [_parse_item(item.strip(), text) for item in text.split(",")]


def _parse_item(item: str, text: str) -> Selector:
    if item in _WORDS:
        return Selector(item)
    match = _NUMBERS.fullmatch(item)
    if match is None:
        raise ValueError(
            f"{text!r} names layers by {item!r}: expected {', '.join(_WORDS)}, or decoder layers by number such as "
            "0-3,8"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"{text!r} has the range {item}, which is empty: write {last}-{first}")
    return Selector(item, first, last)


def recomputed_parts(rules: Sequence[RecomputeRuleConfig], layer: NamedLayer) -> frozenset[RecomputePart]:
    """What all rules together have a layer recompute.

    Parts that the layer does not have are left out, and so are parts that lie inside another one: the SwiGLU
    products and token copies inside ``ffn``, both norms inside ``attention`` and ``ffn`` together.

    Raises:
        ValueError: a rule's ``layers`` cannot be read.
    """
    named = [rule for rule in rules if any(item.names(layer) for item in parse_layers(rule.layers))]
    parts: set[RecomputePart] = {part for rule in named for part in rule.parts}
    if not layer.moe:
        parts.discard("moe_permutation")
    if "ffn" in parts:
        parts -= {"activation", "moe_permutation"}
    if {"attention", "ffn"} <= parts:
        parts.discard("norm")
    return frozenset(parts)
