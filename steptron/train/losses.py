"""The one place that combines the parts of the training loss.

Losses are sums divided by global token counts, which are known before the first micro-batch:
cutting a batch into other micro-batches changes nothing but the EP term, which is defined per
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from steptron.config.schema import LossConfig
from steptron.data.batch import MicroBatch
from steptron.model.mtp import mtp_loss_mask


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a batch.

    Attributes:
        valid: non-padding input tokens, over all data-parallel ranks and micro-batches.
        targets: positions with a target, for the main head and each MTP depth that trains, over all.
        local_valid: non-padding input tokens of each micro-batch of this rank.
    """

    valid: int
    targets: tuple[int, ...]
    local_valid: tuple[int, ...]


def count_tokens(batches: Sequence[MicroBatch], mtp_depths: int, group: dist.ProcessGroup) -> TokenCounts:
    """Counts this rank's micro-batches, which hold whole sequences, and adds up over its data-parallel group."""
    counts = torch.stack(
        [
            torch.stack(
                [
                    (batch.documents_BS >= 0).sum(),
                    batch.loss_mask_BS.sum(),
                    *(mtp_loss_mask(batch, depth).sum() for depth in range(1, mtp_depths + 1)),
                ]
            )
            for batch in batches
        ]
    )
    total = counts.sum(dim=0)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    valid, *targets = total.tolist()
    return TokenCounts(valid, tuple(targets), tuple(counts[:, 0].tolist()))


def mtp_weights(config: LossConfig, depths: int) -> list[float]:
    """Weight of each MTP depth's mean loss: w * beta^(k-1) / sum_j beta^(j-1) (FastMTP)."""
    powers = [config.mtp_decay**k for k in range(depths)]
    return [config.mtp_weight * power / sum(powers) for power in powers]


def loss_coefficients(config: LossConfig, counts: TokenCounts) -> list[float]:
    """Factors on the summed cross entropies [main, MTP 1, …] that give their share of the total loss."""
    weights = [1.0, *mtp_weights(config, len(counts.targets) - 1)]
    return [weight / max(count, 1) for weight, count in zip(weights, counts.targets, strict=True)]
