"""Keys and values of the tokens that were computed, layer by layer, in blocks.

Layers with the same window form a group, which has a pool of blocks of its own: a sequence has the same blocks in all
layers of a group. Without a window it keeps all of its blocks; with one it gives back those that no query sees any
more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from steptron.engine.blocks import BlockPool, Key
from steptron.model.layer_spec import AttentionSpec, ModelSpec


@dataclass
class Blocks:
    """What a sequence holds in a group.

    Attributes:
        first: number of the sequence's first block that it still has; those before it are given back.
        held: its blocks from there on.
    """

    first: int = 0
    held: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """Number of the block after the last."""
        return self.first + len(self.held)


class LayerGroup:
    """The layers of one window.

    Attributes:
        window: keys that a query sees, itself included; None: all.
        pool: the blocks.
        layers: keys and values [blocks * block size, g, D] of each layer, by name.
    """

    def __init__(
        self, window: int | None, num_blocks: int, block_size: int, layers: dict[str, AttentionSpec], like: torch.Tensor
    ) -> None:
        self.window = window
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.layers = {
            name: (
                like.new_zeros(num_blocks * block_size, spec.num_kv_groups, spec.head_dim),
                like.new_zeros(num_blocks * block_size, spec.num_kv_groups, spec.head_dim),
            )
            for name, spec in layers.items()
        }

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        return sum(part.nbytes for pair in self.layers.values() for part in pair)

    def needed(self, blocks: Blocks, places: int) -> int:
        """How many blocks are missing for so many places."""
        return max(0, -(-places // self.block_size) - blocks.stop)

    def extend(self, blocks: Blocks, places: int) -> None:
        """Takes blocks up to so many places.

        Raises:
            OutOfBlocks: there are not enough; those taken so far stay with the sequence.
        """
        for _ in range(self.needed(blocks, places)):
            blocks.held.append(self.pool.take())

    def trim(self, blocks: Blocks, place: int) -> None:
        """Gives back the blocks that no query from a place on sees."""
        if self.window is None:
            return
        unseen = min(max(0, place - self.window + 1) // self.block_size, blocks.stop)
        for block in blocks.held[: max(0, unseen - blocks.first)]:
            self.pool.release(block)
        blocks.held = blocks.held[max(0, unseen - blocks.first) :]
        blocks.first = max(blocks.first, unseen)

    def release(self, blocks: Blocks) -> None:
        """Gives back all of them."""
        for block in blocks.held:
            self.pool.release(block)
        blocks.first, blocks.held = 0, []

    def first_needed(self, num_blocks: int) -> int:
        """Number of the first of so many blocks that a query after them sees."""
        return 0 if self.window is None else max(0, num_blocks * self.block_size - self.window + 1) // self.block_size

    def has(self, keys: list[Key]) -> bool:
        """Whether all blocks of a prefix that queries after it see are there."""
        return all(self.pool.find(key) is not None for key in keys[self.first_needed(len(keys)) :])

    def share(self, blocks: Blocks, keys: list[Key]) -> None:
        """Gives a sequence without blocks those of a prefix that is there."""
        assert not blocks.held
        blocks.first = self.first_needed(len(keys))
        for key in keys[blocks.first :]:
            block = self.pool.find(key)
            assert block is not None, "has() was asked before"
            self.pool.share(block)
            blocks.held.append(block)

    def publish(self, blocks: Blocks, keys: list[Key], first: int) -> None:
        """Lets others find the blocks from a number on that are whole, as many as there are keys."""
        for number in range(max(first, blocks.first), len(keys)):
            self.pool.publish(blocks.held[number - blocks.first], keys[number])


@dataclass(frozen=True)
class CacheSize:
    """How large a cache is.

    Attributes:
        block_size: tokens of a block.
        tokens: that the full layers can hold, of all sequences together.
        sequences: as many as the sliding layers have room for.
        chunk: tokens of a sequence that are computed at once, at most.
    """

    block_size: int
    tokens: int
    sequences: int
    chunk: int

    def blocks(self, window: int | None) -> int:
        """Blocks of a group."""
        if window is None:
            return -(-self.tokens // self.block_size)
        # What a chunk's first query sees and the chunk itself, neither of which begins with a block.
        own = -(-(window + self.chunk) // self.block_size) + 1
        return min(self.sequences * own, -(-self.tokens // self.block_size) + self.sequences)


def layer_groups(spec: ModelSpec, mtp_depths: int, size: CacheSize, like: torch.Tensor) -> list[LayerGroup]:
    """The cache of a model.

    Args:
        spec: the model.
        mtp_depths: that have a cache too.
        size: how large it is.
        like: device and dtype of keys and values.
    """
    attention = {f"layers.{number}": layer.attention for number, layer in enumerate(spec.layers)}
    attention |= {f"mtp.{depth}": mtp.layer.attention for depth, mtp in enumerate(spec.mtp[:mtp_depths])}
    windows = dict.fromkeys(layer.window for layer in attention.values())
    return [
        LayerGroup(
            window,
            size.blocks(window),
            size.block_size,
            {name: layer for name, layer in attention.items() if layer.window == window},
            like,
        )
        for window in windows
    ]
