"""Aggregates of an iteration's frames: for each metric and layer, statistics of every item over all its samples.

What counts as a sample:

- Folding none: each micro-batch of each rank (a rank, where it has one value for the iteration).
- Folded moments: count, mean, rms, minimum and maximum come exactly from the moments; median and p99 are those of the
  ranks' means, each with the same weight, whatever its count. Where some ranks fold an item and others do not, median
  and p99 are those of the samples and the means together, and the others are still exact.
- Sums and roots of sums of squares: the values of all ranks make one sample. It is not measured when a part is NaN,
  since it would be too small without. When ranks are missing it is that of the others.

Of metrics of groups the largest of the groups in each micro-batch is made, too (``moe.group_load_max``,
``moe.group_share_max``), where all groups' values of a micro-batch are known side by side: the values are not folded,
and either a rank sends all groups, or every group is sent by equally many ranks, of which the k-th of each, by rank,
are taken for one group of ranks, as in every layout of groups x replicas. That is checked: such values are over their
mean, so that those of a micro-batch have to average 1. Where one does not, nothing is made.

NaN is not measured and does not count. Infinities are values: a maximum of inf is seen, and makes the mean inf.
Median and p99 are interpolated linearly. Sums are made in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from steptron_metrics import catalogue
from steptron_metrics.protocol.description import Combination, Folding, Series
from steptron_metrics.reducer.layout import Body, Layout, Layouts, Own
from steptron_metrics.reducer.statistics import Moments, quantiles, ragged
from steptron_metrics.results import STATISTICS, Aggregate

MAX_ITEMS = 1 << 21
"""Of an iteration, all metrics and layers together; the aggregates of so many take up 117 MB."""
BLOCK = 1 << 18
"""Values that are worked on at a time: with their float64 copy they stay in a core's cache."""

_ROUNDING = 1e-3
"""By how much loads of one micro-batch, each over their mean in float32, may average something else than 1."""

_Key = tuple[str, int]
"""Metric and layer."""


class _Part(NamedTuple):
    """Where a group's values of some items of a series lie: row r of item i at ``start + r * stride + i``."""

    group: int
    start: int
    stride: int
    rows: int
    folding: Folding
    combination: Combination

    @property
    def signature(self) -> tuple[int, int, Folding, Combination]:
        return self.group, self.rows, self.folding, self.combination


class _Piece(NamedTuple):
    """Consecutive items that the same series hold: ``width`` columns of the result from ``target`` on."""

    target: int
    width: int
    parts: tuple[_Part, ...]


@dataclass
class _Group:
    """Runs of one body: ``values[i]`` float32 [body.size], firsts int64 [runs, len(body.singles)], and their ranks."""

    body: Body
    values: list[np.ndarray] = field(default_factory=list)
    firsts: list[np.ndarray] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


class _Share(NamedTuple):
    """What a group says of a metric's layer; ``firsts`` int64 [frames] where they differ, in a series with one item."""

    first: int
    width: int
    part: _Part
    firsts: np.ndarray | None


def reduce(
    frames: Sequence[tuple[tuple[Series, ...], np.ndarray]], ranks: Sequence[int] | None = None
) -> list[Aggregate]:
    """Reduces frames, one a rank.

    Args:
        frames: of each its description, and its values, float32 [sum of the series' sizes].
        ranks: of each, which rank sent it: the item of single values of metrics whose items are ranks in the catalogue,
            whatever their description says. None: their descriptions say it.

    Returns:
        Aggregates by metric and layer.

    Raises:
        ValueError: values do not fit their description, or there are more than ``MAX_ITEMS`` items.
    """
    layouts = Layouts(lambda content: ())
    known: dict[int, Layout] = {}
    for series, _ in frames:
        if id(series) not in known:
            known[id(series)] = layouts.make(series)
    return reduce_frames([(known[id(series)], values) for series, values in frames], ranks)


def reduce_frames(frames: Sequence[tuple[Layout, np.ndarray]], ranks: Sequence[int] | None = None) -> list[Aggregate]:
    """:func:`reduce` where the layouts are known."""
    groups = _grouped(frames, ranks)
    shares = _shares(groups)
    items = {key: max(map(_end, of_key)) for key, of_key in shares.items()}
    own = _with_own(frames, items)
    if sum(items.values()) > MAX_ITEMS:
        raise ValueError(
            f"{sum(items.values())} items in all metrics and layers together; at most {MAX_ITEMS} are taken"
        )
    keys = sorted(items)
    scattered = [key for key in keys if key in own or any(share.firsts is not None for share in shares[key])]
    # Those that are reduced value by value lie at the beginning.
    starts: dict[_Key, int] = {}
    start = 0
    for key in scattered + sorted(items.keys() - set(scattered)):
        starts[key] = start
        start += items[key]
    values = np.full((len(STATISTICS), start), np.nan, np.float32)
    values[0] = 0
    batches: dict[tuple[object, ...], list[_Piece]] = {}
    with np.errstate(invalid="ignore", over="ignore"):
        if scattered:
            end = starts[scattered[-1]] + items[scattered[-1]]
            placed = [(starts[key], share) for key in scattered for share in shares.get(key, ())]
            values[:, :end] = _scattered(groups, placed, frames, starts, end)
        for key in shares.keys() - set(scattered):
            for piece in _pieces(shares[key], starts[key]):
                batches.setdefault(tuple(part.signature for part in piece.parts), []).append(piece)
        for pieces in batches.values():
            pieces.sort(key=lambda piece: piece.parts[0].start)
            for chunk in _chunks(groups, pieces):
                columns = np.concatenate([np.arange(piece.target, piece.target + piece.width) for piece in chunk])
                values[:, columns] = _dense(groups, chunk)
    made = [Aggregate(*key, values[:, starts[key] : starts[key] + items[key]]) for key in keys]
    return made + list(_largest_of_groups(groups, shares, items))


def _grouped(frames: Sequence[tuple[Layout, np.ndarray]], ranks: Sequence[int] | None) -> list[_Group]:
    groups: dict[int, _Group] = {}
    for number, (layout, values) in enumerate(frames):
        if values.size != layout.size:
            raise ValueError(f"{values.size} values for a description of {layout.size}")
        for body, start, firsts in layout.runs:
            if ranks is not None and body.of_rank.size:
                firsts = firsts.copy()
                firsts[body.of_rank] = ranks[number]
            group = groups.get(id(body))
            if group is None:
                group = groups[id(body)] = _Group(body)
            group.values.append(values[start : start + body.size])
            group.firsts.append(firsts)
            group.ranks.append(number if ranks is None else ranks[number])
    return list(groups.values())


def _with_own(frames: Sequence[tuple[Layout, np.ndarray]], items: dict[_Key, int]) -> set[_Key]:
    """Keys of own series, whose items are added to the number of ``items``."""
    keys: set[_Key] = set()
    for own in {id(own): own for layout, _ in frames for own in layout.own.values()}.values():
        for key, end in zip(own.keys, own.ends.tolist(), strict=True):
            if end > items.get(key, 0):
                items[key] = end
        keys.update(own.keys)
    return keys


def _end(share: _Share) -> int:
    return share.first + share.width if share.firsts is None else int(share.firsts.max()) + 1


def _shares(groups: Sequence[_Group]) -> dict[_Key, list[_Share]]:
    shares: dict[_Key, list[_Share]] = {}
    for number, group in enumerate(groups):
        firsts = np.stack(group.firsts)
        varied = (firsts != firsts[0]).any(axis=0)
        single = {index: column for column, index in enumerate(group.body.singles)}
        for index, (series, start) in enumerate(zip(group.body.series, group.body.offsets, strict=True)):
            part = _Part(number, start, series.count, series.rows, series.folding, series.combination)
            column = single.get(index)
            if column is None:
                share = _Share(series.first, series.count, part, None)
            elif varied[column]:
                share = _Share(0, 1, part, firsts[:, column])
            else:
                share = _Share(int(firsts[0, column]), 1, part, None)
            shares.setdefault((series.metric, series.layer), []).append(share)
    return shares


def _pieces(shares: Sequence[_Share], target: int) -> Iterator[_Piece]:
    """Cuts a metric's items where a series begins or ends, so that the same series hold all items of a piece."""
    if len(shares) == 1:
        share = shares[0]
        yield _Piece(target + share.first, share.width, (share.part,))
        return
    edges = sorted({edge for share in shares for edge in (share.first, share.first + share.width)})
    at = {edge: number for number, edge in enumerate(edges)}
    parts: list[list[_Part]] = [[] for _ in edges]
    for share in shares:
        for number in range(at[share.first], at[share.first + share.width]):
            offset = edges[number] - share.first
            parts[number].append(share.part._replace(start=share.part.start + offset) if offset else share.part)
    for number, among in enumerate(parts):
        if among:
            yield _Piece(target + edges[number], edges[number + 1] - edges[number], tuple(among))


def _chunks(groups: Sequence[_Group], pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one signature together, or parts of large ones, of about ``BLOCK`` values."""
    height = sum(len(groups[part.group].values) * part.rows for part in pieces[0].parts)
    width = max(BLOCK // height, 1)
    chunk: list[_Piece] = []
    room = width
    for piece in pieces:
        if chunk and piece.width > room:
            yield chunk
            chunk, room = [], width
        for start in range(0, piece.width, width):
            if start:
                yield chunk
                chunk, room = [], width
            cut = min(width, piece.width - start)
            parts = tuple(part._replace(start=part.start + start) if start else part for part in piece.parts)
            chunk.append(_Piece(piece.target + start, cut, parts))
            room -= cut
    if chunk:
        yield chunk


def _fetch(groups: Sequence[_Group], chunk: Sequence[_Piece], number: int) -> Iterator[tuple[int, np.ndarray]]:
    """The values of the chunk's part ``number``: column of the chunk, float32 [frames, rows, width], side by side."""
    first = chunk[0].parts[number]
    frames, rows = groups[first.group].values, first.rows
    column = index = 0
    while index < len(chunk):
        part, width = chunk[index].parts[number], chunk[index].width
        index += 1
        if rows == 1 or part.stride == width:
            # Series that follow each other come in one copy a frame.
            begin, end = part.start, part.start + rows * width
            inside = [width]
            while index < len(chunk):
                after = chunk[index].parts[number]
                if after.start != end or not (rows == 1 or after.stride == chunk[index].width):
                    break
                inside.append(chunk[index].width)
                end += rows * inside[-1]
                index += 1
            block = np.concatenate([values[begin:end] for values in frames]).reshape(len(frames), end - begin)
            if rows == 1:
                inside = [end - begin]
            at = 0
            for width in inside:
                yield column, block[:, at : at + rows * width].reshape(len(frames), rows, width)
                at += rows * width
                column += width
        else:
            span = (rows - 1) * part.stride + width
            block = np.empty((len(frames), rows, width), np.float32)
            for row, values in zip(block, frames, strict=True):
                inside_frame = values[part.start : part.start + span]
                row[:] = np.lib.stride_tricks.as_strided(
                    inside_frame, (rows, width), (part.stride * values.itemsize, values.itemsize)
                )
            yield column, block
            column += width


def _dense(groups: Sequence[_Group], chunk: Sequence[_Piece]) -> np.ndarray:
    """float32 [7, columns of the chunk], whose pieces have the same signature."""
    width = sum(piece.width for piece in chunk)
    parts = chunk[0].parts
    heights = [_height(groups, part) for part in parts]
    combinations = sorted({part.combination for part in parts} - {Combination.SAMPLES})
    plain = sum(height for height, part in zip(heights, parts, strict=True) if part.folding is Folding.NONE)
    raw = plain + len(combinations)
    folded = sum(heights) - plain
    # Samples first, then what combinations make, then means of what is folded.
    samples = np.empty((width, raw + folded), np.float32)
    added = {combination: np.zeros(width) for combination in combinations}
    moments = Moments(width)
    begin = {Folding.NONE: 0, Folding.MOMENTS: raw}
    for number, (part, height) in enumerate(zip(parts, heights, strict=True)):
        rows = slice(begin[part.folding], begin[part.folding] + height)
        begin[part.folding] += height
        for column, block in _fetch(groups, chunk, number):
            where = slice(column, column + block.shape[2])
            if part.folding is Folding.MOMENTS:
                samples[where, rows] = moments.add_folded(block, where).T
            elif part.combination is Combination.SAMPLES:
                samples[where, rows] = block.reshape(height, -1).T
            else:
                added[part.combination][where] += _powers(part.combination, block[:, 0]).sum(axis=0)
    for column, combination in enumerate(combinations, start=plain):
        samples[:, column] = _whole(combination, added[combination])
    moments.add_samples(samples[:, :raw])
    return moments.statistics(quantiles(samples))


def _height(groups: Sequence[_Group], part: _Part) -> int:
    """How many samples a part has of each of its items, before parts of a sum are added."""
    if part.combination is not Combination.SAMPLES:
        return 0
    return len(groups[part.group].values) * (1 if part.folding is Folding.MOMENTS else part.rows)


def _powers(combination: Combination, values: np.ndarray) -> np.ndarray:
    exact: np.ndarray = values.astype(np.float64)
    return np.square(exact) if combination is Combination.ROOT_SUM_SQUARES else exact


def _whole(combination: Combination, total: np.ndarray) -> np.ndarray:
    return np.sqrt(total) if combination is Combination.ROOT_SUM_SQUARES else total


def _scattered(
    groups: Sequence[_Group],
    shares: Sequence[tuple[int, _Share]],
    frames: Sequence[tuple[Layout, np.ndarray]],
    starts: dict[_Key, int],
    columns: int,
) -> np.ndarray:
    """Metrics' layers of which ranks of one group send different items, or that own series are of.

    Args:
        groups: of the frames' runs.
        shares: what they say of these, and the column at which the metric's layer begins.
        frames: for their own series.
        starts: columns at which metrics' layers begin.
        columns: their number.

    Returns:
        float32 [7, columns].
    """
    item, samples = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    folded_item, means = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    added: dict[Combination, np.ndarray] = {}
    folded = Moments(columns)

    def take(combination: Combination, at: np.ndarray, values: np.ndarray) -> None:
        if combination is Combination.SAMPLES:
            item.append(at)
            samples.append(values)
        else:
            total = added.setdefault(combination, np.zeros((2, columns)))
            total[0] += np.bincount(at, _powers(combination, values), columns)
            total[1] += np.bincount(at, minlength=columns)

    for start, share in shares:
        part = share.part
        ((_, block),) = _fetch(groups, [_Piece(0, share.width, (part,))], 0)
        firsts = start + (np.array([share.first]) if share.firsts is None else share.firsts)
        of = np.broadcast_to((firsts[:, None] + np.arange(share.width))[:, None], block.shape)
        if part.folding is Folding.MOMENTS:
            for frame, at in zip(block, of[:, 0], strict=True):
                folded_item.append(at)
                means.append(folded.add_folded(frame[None], at)[0])
        else:
            take(part.combination, of.ravel(), block.ravel())
    for combination in Combination:
        for at, values in _own_values(frames, combination, starts):
            take(combination, at, values)
    for combination, (total, parts) in added.items():
        item.append(np.flatnonzero(parts))
        samples.append(_whole(combination, total[parts > 0]).astype(np.float32))
    moments, both = ragged(columns, np.concatenate(item), np.concatenate(samples))
    if len(means) > 1:
        moments.add(folded)
        _, both = ragged(columns, np.concatenate(item + folded_item), np.concatenate(samples + means))
    return moments.statistics(both)


def _largest_of_groups(
    groups: Sequence[_Group], shares: dict[_Key, list[_Share]], items: dict[_Key, int]
) -> Iterator[Aggregate]:
    """Of metrics of groups the largest in each micro-batch."""
    for (name, layer), of_key in shares.items():
        made = f"{name}_max"
        metric = catalogue.find(name)
        if metric is None or metric.items != "group" or catalogue.find(made) is None or (made, layer) in items:
            continue
        rows = _side_by_side(groups, of_key, items[name, layer])
        if rows is not None and len(rows):
            moments, both = ragged(1, np.zeros(len(rows), np.int64), rows.max(axis=1))
            yield Aggregate(made, layer, moments.statistics(both))


def _side_by_side(groups: Sequence[_Group], shares: Sequence[_Share], items: int) -> np.ndarray | None:
    """float32 [micro-batches, items], those with something not measured left out; None where it is not known which
    values are of one micro-batch."""
    part = shares[0].part
    width = shares[0].width
    alike = {(share.width, share.part.rows, share.part.folding, share.part.combination) for share in shares}
    if len(alike) > 1 or part.folding is not Folding.NONE or part.combination is not Combination.SAMPLES:
        return None
    blocks, firsts, ranks = [], [], []
    for share in shares:
        ((_, block),) = _fetch(groups, [_Piece(0, width, (share.part,))], 0)
        blocks.append(block)
        firsts.append(np.full(len(block), share.first) if share.firsts is None else share.firsts)
        ranks.append(groups[share.part.group].ranks)
    first = np.concatenate(firsts)
    places, number = np.unique(first, return_counts=True)
    if not np.array_equal(places, np.arange(0, items, width)) or (number != number[0]).any():
        return None
    order = np.lexsort((np.concatenate(ranks), first))
    table = np.concatenate(blocks)[order].reshape(len(places), -1, width)
    rows: np.ndarray = table.transpose(1, 0, 2).reshape(-1, items)
    mean = rows.mean(axis=1, dtype=np.float64)
    measured = ~np.isnan(mean) & (mean != 0)  # 0: a micro-batch without tokens
    return rows[measured] if (np.abs(mean[measured] - 1) <= _ROUNDING).all() else None


def _own_values(
    frames: Sequence[tuple[Layout, np.ndarray]], combination: Combination, starts: dict[_Key, int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Columns, int64 [n], and values, float32 [n], of own series that are combined in one way, some at a time."""
    at: list[np.ndarray] = []
    values: list[np.ndarray] = []
    size = 0
    for layout, of_frame in frames:
        own = layout.own.get(combination)
        if own is None:
            continue
        at.append(_columns(own, starts))
        values.append(of_frame[own.at])
        size += own.at.size
        if size >= 4 * BLOCK:
            yield np.concatenate(at), np.concatenate(values)
            at, values, size = [], [], 0
    if at:
        yield np.concatenate(at), np.concatenate(values)


def _columns(own: Own, starts: dict[_Key, int]) -> np.ndarray:
    of_series = np.array([starts[key] for key in own.keys], np.int64)
    columns: np.ndarray = of_series[own.series] + own.items
    return columns
