"""The pool of blocks: counts, sharing, and what is forgotten first."""

from __future__ import annotations

import random

import pytest

from steptron.engine.blocks import BlockPool, OutOfBlocks, block_keys, more_keys


def test_blocks_are_taken_once() -> None:
    pool = BlockPool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(OutOfBlocks):
        pool.take()
    pool.release(1)
    assert pool.num_available == 1 and pool.take() == 1


def test_what_nobody_uses_is_found_until_its_room_is_needed() -> None:
    pool = BlockPool(3)
    first, second, third = pool.take(), pool.take(), pool.take()
    pool.publish(first, b"1")
    pool.publish(second, b"2")
    for block in (second, first, third):
        pool.release(block)
    assert pool.num_available == 3
    assert pool.take() == third  # it held nothing to be found
    pool.share(second)
    assert pool.find(b"2") == second
    assert pool.take() == first and pool.find(b"1") is None
    with pytest.raises(OutOfBlocks):
        pool.take()


def test_the_longest_unused_goes_first() -> None:
    pool = BlockPool(2)
    blocks = {name: pool.take() for name in (b"a", b"b")}
    for name, block in blocks.items():
        pool.publish(block, name)
        pool.release(block)
    pool.share(blocks[b"a"])
    pool.release(blocks[b"a"])
    pool.take()
    assert pool.find(b"a") is not None and pool.find(b"b") is None


def test_of_equal_blocks_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"x")
    pool.publish(second, b"x")
    pool.release(second)
    assert pool.find(b"x") == first and pool.num_available == 1


def test_forgetting_leaves_users_their_blocks() -> None:
    pool = BlockPool(2)
    used, idle = pool.take(), pool.take()
    pool.publish(used, b"u")
    pool.publish(idle, b"i")
    pool.release(idle)
    pool.forget_all()
    assert pool.find(b"u") is None and pool.find(b"i") is None
    assert pool.take() == idle
    pool.release(used)
    assert pool.num_available == 1


def test_random_use_loses_no_block() -> None:
    draw, pool = random.Random(0), BlockPool(8)
    used: list[int] = []
    contents: dict[int, bytes] = {}
    for number in range(3_000):
        if draw.random() < 0.5:
            if draw.random() < 0.3 and (block := pool.find(str(draw.randrange(20)).encode())) is not None:
                assert contents[block] is not None
                pool.share(block)
                used.append(block)
            elif pool.num_available:
                block = pool.take()
                assert block not in used
                used.append(block)
                contents[block] = str(draw.randrange(20)).encode()
                pool.publish(block, contents[block])
        elif used:
            pool.release(used.pop(draw.randrange(len(used))))
        assert pool.num_available == 8 - len(set(used)), number


def test_keys_depend_on_all_before_and_on_the_version() -> None:
    keys = block_keys([1, 2, 3, 4, 5], 2, 0)
    assert len(keys) == 2
    assert block_keys([1, 2, 3, 9], 2, 0)[0] == keys[0] and block_keys([1, 2, 3, 9], 2, 0)[1] != keys[1]
    assert block_keys([9, 2, 3, 4], 2, 0)[1] != keys[1]
    assert set(block_keys([1, 2, 3, 4], 2, 1)).isdisjoint(keys)
    assert not more_keys(keys, [1, 2, 3, 4, 5], 2, 0)
    assert more_keys(keys, [1, 2, 3, 4, 5, 6], 2, 0) and keys == block_keys([1, 2, 3, 4, 5, 6], 2, 0)
