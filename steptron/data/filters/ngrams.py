"""An index of benchmark items by the n-grams of their words.

Words of the items have numbers; a word that no item has is 0, and an n-gram with such a word matches nothing. An
n-gram is looked up by a 64-bit polynomial of its words' random codes. Exact matches are verified word by word. Shares
of n-grams rest on the 64 bits: of a million indexed n-grams, one meets a window of a document by chance once in 2·10^13
windows.

Memory, in every process: about 12 bytes per n-gram, 4 per word and 250 per item, and 120 per different word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


@dataclass(frozen=True)
class Match:
    """An item that was found in a document.

    Attributes:
        item: its number.
        kind: ``exact``, all its words in a row; or ``ngram``, some of its n-grams.
        found: number of its different n-grams that occur in the document.
        total: number of its different n-grams.
    """

    item: int
    kind: str
    found: int
    total: int

    @property
    def share(self) -> float:
        return self.found / self.total


class ItemIndex:
    """Finds items in documents.

    Args:
        items: the words of each.
        size: words of an n-gram. Items with fewer words are matched whole.
        min_words: items with fewer words are not looked for; 1 at least.

    Attributes:
        num_searched: items that are looked for.
        num_ngrams: entries of the index.
    """

    def __init__(self, items: Sequence[Sequence[str]], size: int, min_words: int) -> None:
        self._size = size
        self._number_of: dict[str, int] = {}
        self._items: list[np.ndarray] = []
        for words in items:
            numbers = [self._number_of.setdefault(word, len(self._number_of) + 1) for word in words]
            self._items.append(np.array(numbers, np.int32))
        self._codes_V = np.random.default_rng(0).integers(1, 2**64, len(self._number_of) + 1, np.uint64)
        by_size: dict[int, list[int]] = {}
        for number, words_N in enumerate(self._items):
            if words_N.size >= max(min_words, 1):
                by_size.setdefault(min(words_N.size, size), []).append(number)
        self._tables = {length: self._table(length, numbers) for length, numbers in sorted(by_size.items())}
        self.num_searched = sum(len(numbers) for numbers in by_size.values())
        self.num_ngrams = sum(table.hashes_G.size for table in self._tables.values())

    def matches(self, words: Sequence[str], min_share: float | None, exact: bool = True) -> list[Match]:
        """The items that occur in a document, by number.

        Args:
            words: the document's.
            min_share: share of an item's different n-grams that must occur; None looks for exact matches only.
            exact: whether to look for items whose words all occur in a row. Items with fewer words than an n-gram
                are found by their one shorter n-gram, of whatever kind the search is.
        """
        words_W = np.fromiter(map(self._number_of.get, words, repeat(0)), np.int32, len(words))
        return [
            match
            for size, table in self._tables.items()
            for match in self._found(words_W, size, table, min_share, exact)
        ]

    def _table(self, size: int, numbers: Sequence[int]) -> _Table:
        hashes, owners, totals, firsts = [], [], {}, {}
        for number in numbers:
            hashes_N = self._hashes(self._items[number], size)[1]
            unique = np.unique(hashes_N)
            hashes.append(unique)
            owners.append(np.full(unique.size, number, np.int32))
            totals[number], firsts[number] = unique.size, hashes_N[0]
        hashes_G, owners_G = np.concatenate(hashes), np.concatenate(owners)
        order_G = np.argsort(hashes_G, kind="stable")
        return _Table(hashes_G[order_G], owners_G[order_G], totals, firsts)

    def _hashes(self, words_W: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """First words and hashes of the windows without unknown words."""
        count = words_W.size - size + 1
        if count <= 0:
            return np.zeros(0, np.int64), np.zeros(0, np.uint64)
        unknown_W1 = np.concatenate([[0], np.cumsum(words_W == 0)])
        starts_R = np.flatnonzero(unknown_W1[size:] == unknown_W1[:-size])
        hashes_R = np.zeros(starts_R.size, np.uint64)
        for offset in range(size):
            hashes_R *= _BASE
            hashes_R += self._codes_V[words_W[starts_R + offset]]
        return starts_R, hashes_R

    def _found(
        self, words_W: np.ndarray, size: int, table: _Table, min_share: float | None, exact: bool
    ) -> Iterator[Match]:
        starts_R, hashes_R = self._hashes(words_W, size)
        places = np.searchsorted(table.hashes_G, hashes_R)
        hit_R = table.hashes_G[np.minimum(places, table.hashes_G.size - 1)] == hashes_R
        if not hit_R.any():
            return
        starts_R, hashes_R = starts_R[hit_R], hashes_R[hit_R]
        seen = np.unique(hashes_R)
        low, high = (np.searchsorted(table.hashes_G, seen, side) for side in ("left", "right"))
        owners = np.concatenate([table.owners_G[start:end] for start, end in zip(low, high, strict=True)])
        for number, found in zip(*np.unique(owners, return_counts=True), strict=True):
            total = table.totals[int(number)]
            starts = starts_R[hashes_R == table.firsts[int(number)]]
            item_N = self._items[number]
            if (exact or item_N.size < self._size) and any(
                np.array_equal(words_W[start : start + item_N.size], item_N) for start in starts
            ):
                yield Match(int(number), "exact", int(found), total)
            elif min_share is not None and item_N.size >= self._size and found >= min_share * total:
                yield Match(int(number), "ngram", int(found), total)


@dataclass(frozen=True)
class _Table:
    """N-grams of one size: hashes in ascending order, the item of each; per item, their number and its first hash."""

    hashes_G: np.ndarray
    owners_G: np.ndarray
    totals: dict[int, int]
    firsts: dict[int, np.uint64]
