"""Orders of documents and samples: what one epoch of a dataset looks like, and where it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from steptron.data.permutation import Permutation, mix, permutation


@dataclass(frozen=True)
class DocumentOrder:
    """The documents of an epoch in their order.

    Attributes:
        documents: permutation of the dataset's D documents.
        ends_D: int64 [D], tokens of the epoch up to the end of each, in that order.
    """

    documents: Permutation
    ends_D: np.ndarray


class Orders(Protocol):
    """Gives the orders of one dataset. Each is a pure function of the arguments and the dataset."""

    def documents(self, lengths_D: np.ndarray, seed: int, epoch: int) -> DocumentOrder:
        """The order of the documents in an epoch.

        Args:
            lengths_D: int32, tokens of each document.
            seed: any whole number from 0 up.
            epoch: from 0 up.
        """
        ...

    def samples(self, size: int, seed: int, block: int) -> Permutation:
        """The order of the samples in a block.

        Args:
            size: samples of a block, at least 1.
            seed: any whole number from 0 up.
            block: from 0 up.
        """
        ...


class ComputedOrders:
    """Orders in the memory of this process: 12 bytes per document, 4 per sample (8 beyond 2^32 of them),
    and 8 bytes each while they are computed."""

    def documents(self, lengths_D: np.ndarray, seed: int, epoch: int) -> DocumentOrder:
        key = document_key(seed, epoch)
        order_D = permutation(lengths_D.size, key)
        return DocumentOrder(Permutation(order_D, key), np.cumsum(lengths_D[order_D], dtype=np.int64))

    def samples(self, size: int, seed: int, block: int) -> Permutation:
        key = sample_key(seed, block)
        return Permutation(permutation(size, key), key)


def document_key(seed: int, epoch: int) -> int:
    """Key of the permutation of documents."""
    return mix(seed, epoch)


def sample_key(seed: int, block: int) -> int:
    """Key of the permutation of samples."""
    return mix(seed, block, 1)
