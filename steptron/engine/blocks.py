"""Blocks of cache: who uses them, and which hold the beginning of a sequence that others may share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Key = bytes
"""What a block holds: the tokens up to its end, and the version of the weights that computed it."""


class OutOfBlocks(Exception):
    """Every block is in use."""


class BlockPool:
    """A fixed number of blocks, with reference counts.

    A block that nobody uses any more keeps what it holds until its room is needed, the longest unused first; who asks
    for the same tokens under the same weights gets it back.

    Args:
        num_blocks: how many there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A block for new content.

        Raises:
            OutOfBlocks: there is none.
        """
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            raise OutOfBlocks
        self._uses[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more user of a block."""
        if self._uses[block] == 0:
            del self._idle[block]
        self._uses[block] += 1

    def release(self, block: int) -> None:
        """One user less."""
        self._uses[block] -= 1
        assert self._uses[block] >= 0, f"block {block} is released more often than it was taken"
        if self._uses[block] == 0:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def find(self, key: Key) -> int | None:
        """The block that holds this, if there is one."""
        return self._block_of.get(key)

    def publish(self, block: int, key: Key) -> None:
        """Says what a block holds, now that it does; of two blocks with the same content the first is found."""
        if key not in self._block_of and block not in self._key_of:
            self._key_of[block], self._block_of[key] = key, block

    def forget_all(self) -> None:
        """What blocks hold is not to be found any more; who uses them goes on."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]


def block_keys(tokens: Sequence[int], block_size: int, version: int) -> list[Key]:
    """A key for every whole block of a sequence: each depends on all tokens before it."""
    keys: list[Key] = []
    more_keys(keys, tokens, block_size, version)
    return keys


def more_keys(keys: list[Key], tokens: Sequence[int], block_size: int, version: int) -> bool:
    """Adds the keys of the blocks that have become whole; whether there are any."""
    before = len(keys)
    key = keys[-1] if keys else f"version {version}".encode()
    for start in range(before * block_size, len(tokens) - block_size + 1, block_size):
        content = np.asarray(tokens[start : start + block_size], dtype="<i8").tobytes()
        key = hashlib.blake2b(key + content, digest_size=16).digest()
        keys.append(key)
    return len(keys) > before
