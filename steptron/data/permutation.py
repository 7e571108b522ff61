"""Pseudo-random permutations that are pure functions of their size and a 64-bit key, of any size.

The permutation of 0, ..., n - 1 under a key sorts the numbers by their hash, output ``number`` of the
SplitMix64 generator of state ``key`` (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014). numpy's own shuffle is not used: its result may change between versions.

SplitMix64 is a bijection of 64-bit numbers. So there are no ties, and the sorted hashes alone tell
the order: each is turned back into the number it came from. Nothing but 8 bytes per number is sorted,
and only a range of hashes at a time. For the same reason an order that was written to a file proves
itself where it is read: n numbers below n whose hashes ascend are the permutation, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from steptron.data.errors import DataError

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
# (shift, factor) of each round; the last has no factor.
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

HELD_AT_ONCE = 2**29
"""Most hashes in memory at a time: 4 GiB. Every so many numbers cost one more pass over all numbers."""

_HASHED_AT_ONCE = 2**17
_SORTED_AT_ONCE = 2**21


def number_dtype(size: int) -> np.dtype:
    """The dtype that holds a permutation of ``size`` numbers: uint32, or int64 beyond 2^32."""
    return np.dtype("<u4") if size <= 2**32 else np.dtype("<i8")


def mix(*numbers: int) -> int:
    """Hashes whole numbers from 0 up, of up to 128 bits, to 64 bits."""
    key = 0
    for number in numbers:
        key = int(_hash(np.array([key ^ (number & _MASK)], np.uint64), number >> 64 & _MASK)[0])
    return key


def permutation_pieces(
    size: int, key: int, held_at_once: int = HELD_AT_ONCE, sorted_at_once: int = _SORTED_AT_ONCE
) -> Iterator[np.ndarray]:
    """The permutation of 0, ..., ``size`` - 1 under a key, from its start on, in pieces.

    Hashes are dealt out to buckets by their highest bits, as many buckets at a time as may be held, and
    sorted bucket by bucket. Takes 8 bytes of memory per hash that is held.

    Args:
        size: how many numbers, from 0 up.
        key: any 64-bit number.
        held_at_once: how many hashes may be held, about.
        sorted_at_once: most hashes of a bucket, about.

    Yields:
        Arrays of ``number_dtype(size)``, none of them empty, of about ``sorted_at_once`` numbers or fewer.
    """
    bits = max(0, -(-size // sorted_at_once) - 1).bit_length()
    counts = _bucket_counts(size, key, bits)
    together = max(1, held_at_once * len(counts) // max(size, 1))
    for first in range(0, len(counts), together):
        borders = [0, *itertools.accumulate(counts[first : first + together])]
        hashes_N = np.empty(borders[-1], np.uint64)
        _fill_buckets(hashes_N, borders, first, bits, _hash_pieces(size, key))
        for start, stop in itertools.pairwise(borders):
            if start < stop:
                hashes_N[start:stop].sort()
                yield _unhash(hashes_N[start:stop], key).astype(number_dtype(size))


def permutation(size: int, key: int) -> np.ndarray:
    """The whole permutation, [size] of ``number_dtype(size)``."""
    numbers_N = np.empty(size, number_dtype(size))
    filled = 0
    for piece_N in permutation_pieces(size, key):
        numbers_N[filled : filled + piece_N.size] = piece_N
        filled += piece_N.size
    return numbers_N


@dataclass(frozen=True)
class Permutation:
    """A permutation that was computed or read, in memory or memory-mapped.

    Attributes:
        numbers_N: [N] of ``number_dtype(N)``.
        key: the key it was made with.
        place: the file it lies in, for messages.
    """

    numbers_N: np.ndarray
    key: int
    place: str = "memory"

    def read(self, start: int, stop: int) -> np.ndarray:
        """Entries [start, stop), int64, checked against the definition together with their neighbours.

        Raises:
            DataError: they are not of this permutation: the file is damaged.
        """
        first = max(start - 1, 0)
        numbers_N = self.numbers_N[first : stop + 1].astype(np.int64)
        self.check(numbers_N, first)
        return numbers_N[start - first : stop - first]

    def check(self, numbers_N: np.ndarray, start: int) -> None:
        """Checks that numbers may follow each other in this permutation.

        Args:
            numbers_N: entries from ``start`` on.
            start: for the message.

        Raises:
            DataError: a number is out of range, or their hashes do not ascend.
        """
        hashes_N = _hash(numbers_N.astype(np.uint64), self.key)
        if not (np.all(hashes_N[1:] > hashes_N[:-1]) and np.all(numbers_N >= 0) and np.all(numbers_N < self.size)):
            raise DataError(
                f"{self.place}: damaged near entry {start} of {self.size}: delete it, or let "
                "`steptron data build-index` replace it"
            )

    @property
    def size(self) -> int:
        return self.numbers_N.size


def _bucket_counts(size: int, key: int, bits: int) -> list[int]:
    """How many hashes begin with each pattern of ``bits`` bits."""
    if bits == 0:
        return [size]
    counts = np.zeros(2**bits, np.int64)
    for hashes_N in _hash_pieces(size, key):
        counts += np.bincount((hashes_N >> np.uint64(64 - bits)).astype(np.int64), minlength=counts.size)
    return counts.tolist()


def _fill_buckets(
    hashes_N: np.ndarray, borders: list[int], first: int, bits: int, pieces: Iterator[np.ndarray]
) -> None:
    """Deals hashes out to ``hashes_N``, those of bucket ``first`` + i from ``borders[i]`` on; leaves others out."""
    cursors = borders[:-1]
    floors = np.array([number << (64 - bits) for number in range(first, first + len(cursors))], np.uint64)
    highest = np.uint64(((first + len(cursors)) << (64 - bits)) - 1)
    for piece_N in pieces:
        if bits:
            piece_N = np.sort(piece_N[(piece_N >= floors[0]) & (piece_N <= highest)])
        cuts = [*np.searchsorted(piece_N, floors).tolist(), piece_N.size] if bits else [0, piece_N.size]
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            hashes_N[cursors[number] : cursors[number] + stop - start] = piece_N[start:stop]
            cursors[number] += stop - start


def _hash_pieces(size: int, key: int) -> Iterator[np.ndarray]:
    for start in range(0, size, _HASHED_AT_ONCE):
        yield _hash(np.arange(start, min(start + _HASHED_AT_ONCE, size), dtype=np.uint64), key)


def _hash(counters_N: np.ndarray, key: int) -> np.ndarray:
    """Outputs number ``counters_N``, uint64 [N], of the SplitMix64 generator of state ``key``."""
    state_N = (counters_N + np.uint64(1)) * np.uint64(_GOLDEN)
    state_N += np.uint64(key)
    for shift, factor in _ROUNDS:
        state_N ^= state_N >> np.uint64(shift)
        state_N *= np.uint64(factor)
    return state_N


def _unhash(hashes_N: np.ndarray, key: int) -> np.ndarray:
    """The inverse of ``_hash``."""
    state_N = hashes_N.copy()
    for shift, factor in reversed(_ROUNDS):
        state_N *= np.uint64(pow(factor, -1, 2**64))
        # x ^ x >> s is undone by x ^ x >> s ^ x >> 2s ^ ..., of which two terms reach over 64 bits for s > 21.
        state_N ^= (state_N >> np.uint64(shift)) ^ (state_N >> np.uint64(2 * shift))
    state_N -= np.uint64(key)
    state_N *= np.uint64(pow(_GOLDEN, -1, 2**64))
    state_N -= np.uint64(1)
    return state_N
