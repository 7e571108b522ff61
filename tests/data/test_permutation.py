"""Permutations against the definition, computed with Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptron.data.errors import DataError
from steptron.data.permutation import Permutation, mix, number_dtype, permutation, permutation_pieces


def _splitmix64(state: int) -> int:
    """Steele, Lea, Flood 2014: the output of a generator whose state was just advanced to ``state``."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def _slow(size: int, key: int) -> list[int]:
    return sorted(range(size), key=lambda number: _splitmix64((key + (number + 1) * 0x9E3779B97F4A7C15) % 2**64))


def test_the_hash_is_splitmix64() -> None:
    """The first outputs for seed 1234567, as published with the generator's reference code."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [_splitmix64(1234567 + (i + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1) for i in range(4)] == published
    assert permutation(4, 1234567).tolist() == sorted(range(4), key=published.__getitem__)


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(1, 400), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_pieces_are_the_definition_however_little_is_held(size: int, key: int, held: int, at_once: int) -> None:
    pieces = list(permutation_pieces(size, key, held, at_once))
    assert [number for piece in pieces for number in piece.tolist()] == _slow(size, key)
    assert all(piece.size and piece.dtype == number_dtype(size) for piece in pieces)
    assert permutation(size, key).tolist() == _slow(size, key)


def test_large_permutations_do_not_depend_on_what_is_held() -> None:
    """More numbers than are hashed at a time, in many passes, in a few and in one."""
    whole_N = permutation(400_000, 99)
    assert np.array_equal(np.sort(whole_N), np.arange(400_000))
    for held, at_once in ((10**6, 10**6), (10**6, 5_000), (130_000, 50_000), (70_000, 60_000)):
        pieces = list(permutation_pieces(400_000, 99, held, at_once))
        np.testing.assert_array_equal(np.concatenate(pieces), whole_N)
        assert max(piece.size for piece in pieces) < 1.1 * at_once or at_once == 10**6


def test_mix_tells_all_numbers_apart() -> None:
    seeds = [0, 1, 2**63, 1 << 64, (1 << 64) + 1, 2 << 64]
    keys = {mix(*numbers) for seed in seeds for numbers in ((seed, 0), (seed, 1), (seed, 0, 1), (seed, 1, 1))}
    assert len(keys) == 4 * len(seeds)


def test_sizes_beyond_32_bits_take_64() -> None:
    assert number_dtype(2**32).itemsize == 4  # numbers up to 2^32 - 1
    assert number_dtype(2**32 + 1).itemsize == 8


def test_any_damage_is_found_where_it_is_read() -> None:
    numbers_N = permutation(1000, 5)
    sound = Permutation(numbers_N, 5, "FILE")
    for start, stop in ((0, 1000), (0, 1), (999, 1000), (400, 410)):
        read_N = sound.read(start, stop)
        assert read_N.dtype == np.int64
        np.testing.assert_array_equal(read_N, numbers_N[start:stop])
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged_N = numbers_N.copy()
        place = int(random.integers(1000))
        damaged_N[place] ^= np.uint32(1) << np.uint32(random.integers(32))
        with pytest.raises(DataError, match=r"FILE: damaged near entry \d+ of 1000: delete it, or let"):
            Permutation(damaged_N, 5, "FILE").read(place, place + 1)
    for content in (np.zeros(1000, np.uint32), numbers_N[::-1].copy(), permutation(1000, 6)):
        with pytest.raises(DataError, match="damaged"):
            Permutation(content, 5, "FILE").read(0, 1000)
