"""What each token of a dataset is to the loss: the bits of the uint8 dataset ``SPLIT.loss_mask``.

Where there is no such dataset, every token is ``COUNTS``, as in one that was written before there was metadata.
"""

from __future__ import annotations

COUNTS = 1
"""The token is a target."""

METADATA = 2
"""The token belongs to the metadata at the beginning of its document; ``data.metadata`` decides whether it counts."""
