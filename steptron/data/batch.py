"""One micro-batch of training data."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicroBatch:
    """Token sequences with their targets; B sequences of S tokens.

    Attributes:
        tokens_BS: int64 [B, S], inputs.
        labels_BS: int64 [B, S]; ``labels[t]`` is the token that follows ``tokens[t]`` in the stream.
        loss_mask_BS: bool [B, S]; whether predicting ``labels[t]`` counts: false on padding, where
            the target lies in another document (isolated documents) and on masked spans.
        positions_BS: int64 [B, S]; restart at each document when documents are isolated.
        documents_BS: int64 [B, S]; document number within the row, -1 on padding. All zero when
            attention may cross documents.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor
    positions_BS: torch.Tensor
    documents_BS: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """Copies every tensor to a device."""
        return MicroBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))
