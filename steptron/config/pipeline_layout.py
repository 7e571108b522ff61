"""What each pipeline stage holds, as a string in Megatron-Core's notation.

``E`` is the embedding, ``t`` a decoder layer, ``m`` a multi-token-prediction depth, ``L`` the loss, ``|`` the
border of two stages. ``t*3`` is three layers, ``(tt|)*3`` the parenthesised part three times; commas have no
meaning. A string that Megatron-Core 0.16 and 0.19 (``PipelineParallelLayerLayout``) read is read alike here, or
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

_FIELD = "parallel.pipeline_layout"
_TOKEN = re.compile(r"\d+|.", re.DOTALL)
_NAMES = {"E": "embedding (E)", "t": "decoder layer (t)", "m": "MTP depth (m)", "L": "loss (L)"}
# More than any layout of 10,000 layers needs; keeps t*999999999 from filling the memory.
_LONGEST = 100_000


@dataclass(frozen=True)
class StageContents:
    """What one of the pipeline x virtual_pipeline stages holds, in this order."""

    embedding: bool
    layers: int
    mtp_depths: int
    loss: bool


class _Symbol(NamedTuple):
    """One of E, t, m, L and |, and the character of the string, from 1, that it stands at."""

    kind: str
    place: int


def parse_pipeline_layout(
    text: str, num_stages: int, num_layers: int, mtp_depths: int | None = None
) -> tuple[StageContents, ...]:
    """Reads a layout.

    Args:
        text: the layout.
        num_stages: stages that there must be, pipeline x virtual_pipeline.
        num_layers: decoder layers that there must be.
        mtp_depths: MTP depths that there must be; not checked when None.

    Returns:
        Contents by stage, in the order in which the stages are passed through.

    Raises:
        ValueError: names the field, the place in the string and what would be right.
    """
    stages = _stages(_expand(text))
    if len(stages) != num_stages:
        raise ValueError(
            f"{_FIELD} ({text}) has {len(stages)} stage{'' if len(stages) == 1 else 's'}, but parallel.pipeline x "
            f"virtual_pipeline is {num_stages}: write {num_stages - 1} of | between stages"
        )
    for index, stage in enumerate(stages):
        _check_order(text, stage, index, num_stages)
    for kind, wanted, field in (("t", num_layers, "model.num_layers"), ("m", mtp_depths, "model.mtp.depths")):
        found = sum(symbol.kind == kind for stage in stages for symbol in stage)
        if wanted is not None and found != wanted:
            raise ValueError(
                f"{_FIELD} ({text}) has {found} of {kind}, but {field} is {wanted}: write exactly {wanted} of {kind}"
            )
    return tuple(_contents(stage) for stage in stages)


def _contents(stage: list[_Symbol]) -> StageContents:
    kinds = [symbol.kind for symbol in stage]
    return StageContents("E" in kinds, kinds.count("t"), kinds.count("m"), "L" in kinds)


def _check_order(text: str, stage: list[_Symbol], index: int, num_stages: int) -> None:
    """Refuses a stage that is not of the form t*, with one E before it in the first and m* L after it in the last."""
    first, last = index == 0, index == num_stages - 1
    rank = {"t": 1} | ({"E": 0} if first else {}) | ({"m": 2, "L": 3} if last else {})
    kinds = [symbol.kind for symbol in stage]
    form = f"{'E ' if first else ''}t*{' m* L' if last else ''}"
    which = f"stage {index} of 0 to {num_stages - 1}"
    for kind, wanted in (("E", first), ("L", last)):
        if wanted and kind not in kinds:
            raise ValueError(
                f"{_FIELD} ({text}): {which} has no {_NAMES[kind]}: the {'first' if first and kind == 'E' else 'last'} "
                f"stage must be of the form {form}"
            )
    place = "the first stage" if first else "the last stage" if last else "this stage"
    before: _Symbol | None = None
    for symbol in stage:
        if symbol.kind not in rank:
            belongs = "first" if symbol.kind == "E" else "last"
            problem = f"belongs to the {belongs} stage"
        elif before is not None and symbol.kind == before.kind and symbol.kind in "EL":
            problem = "is there twice"
        elif before is not None and rank[symbol.kind] < rank[before.kind]:
            problem = f"cannot follow a {_NAMES[before.kind]}" if before.kind in "tm" else "cannot follow the loss (L)"
        else:
            before = symbol
            continue
        raise ValueError(
            f"{_FIELD} ({text}), character {symbol.place}: the {_NAMES[symbol.kind]} in {which} {problem}: "
            f"{place} must be of the form {form}"
        )


def _stages(symbols: list[_Symbol]) -> list[list[_Symbol]]:
    stages: list[list[_Symbol]] = [[]]
    for symbol in symbols:
        if symbol.kind == "|":
            stages.append([])
        else:
            stages[-1].append(symbol)
    return stages


def _expand(text: str) -> list[_Symbol]:
    """Writes repeats out."""
    tokens = [_Symbol(match[0], match.start() + 1) for match in _TOKEN.finditer(text) if match[0] != ","]
    symbols: list[_Symbol] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token.kind == "(":
            stop = next((i for i in count(position + 1) if i == len(tokens) or tokens[i].kind in "()"), len(tokens))
            if stop == len(tokens):
                raise _unreadable(text, token, "is never closed: write (…)*N")
            if tokens[stop].kind == "(":
                raise _unreadable(text, tokens[stop], "stands inside parentheses, which cannot be nested: write it out")
            part = list(_repeats(text, tokens[position + 1 : stop]))
            if not part:
                raise _unreadable(text, token, "opens an empty pair: leave it out, or write what is repeated")
            times, position = _times(text, tokens, stop + 1)
            if times is None:
                raise _unreadable(text, tokens[stop], "must be followed by *N, how often the part is repeated")
        else:
            after = position + 1
            while after < len(tokens) and tokens[after].kind != "(":
                after += 1
            part, times, position = list(_repeats(text, tokens[position:after])), 1, after
        if len(symbols) + len(part) * times > _LONGEST:
            raise ValueError(f"{_FIELD}, character {token.place}: more than {_LONGEST} layers and stages, written out")
        symbols += part * times
    return symbols


def _repeats(text: str, tokens: list[_Symbol]) -> Iterator[_Symbol]:
    """Writes repeats of single symbols out; there are no parentheses."""
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if token.kind not in (*_NAMES, "|"):
            raise _unreadable(
                text, token, "is not understood here: expected E, t, m, L or |, x*N for N of x, or (…)*N for a part"
            )
        times, position = _times(text, tokens, position + 1)
        yield from [token] * (1 if times is None else times)


def _times(text: str, tokens: list[_Symbol], position: int) -> tuple[int | None, int]:
    """The N of a *N at this position, if there is one, and the position after it."""
    if position == len(tokens) or tokens[position].kind != "*":
        return None, position
    number = tokens[position + 1] if position + 1 < len(tokens) else None
    if number is None or not number.kind.isdecimal():
        raise _unreadable(text, tokens[position], "must be followed by a number")
    if len(number.kind) > len(str(_LONGEST)) or not 1 <= int(number.kind) <= _LONGEST:
        raise _unreadable(text, number, f"is not a possible number of repeats: write 1 to {_LONGEST}")
    return int(number.kind), position + 2


def _unreadable(text: str, token: _Symbol, problem: str) -> ValueError:
    return ValueError(f"{_FIELD} ({text}), character {token.place}: {token.kind} {problem}")
