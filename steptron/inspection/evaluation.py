"""Held-out losses of a model, dataset by dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from steptron.config.schema import DataConfig, DatasetConfig
from steptron.data.samples import Samples, bits_per_byte
from steptron.data.sources import open_source
from steptron.model.assembly import StepModel
from steptron.model.mtp import mtp_loss_mask


@dataclass(frozen=True)
class Evaluation:
    """What a model makes of a dataset's validation split.

    Attributes:
        dataset: its folder.
        tokens: targets of the main head that count.
        lm_loss: cross entropy of the main head, nats per target.
        mtp_losses: of each MTP depth, nearest first.
        bits_per_byte: ``lm_loss`` in bits per byte of text; None where a dataset does not know the bytes that count.
    """

    dataset: Path
    tokens: int
    lm_loss: float
    mtp_losses: tuple[float, ...]
    bits_per_byte: float | None


def open_domains(folders: list[Path], data: DataConfig) -> list[Samples]:
    """The validation split of each dataset, as a source of its own.

    Raises:
        DataError: a folder is no dataset or has no validation split, or two have different tokenizers.
    """
    sources = [open_source([DatasetConfig(path=folder)], "validation", data) for folder in folders]
    for other in sources[1:]:
        sources[0].check_same_tokenizer(other)
    return sources


@torch.no_grad()
def evaluate(
    model: StepModel,
    source: Samples,
    device: torch.device,
    batch_size: int = 4,
    max_sequences: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Mean losses over a validation split, or over its first sequences, which are always the same ones.

    Args:
        model: a whole model on one process, in evaluation mode.
        source: the split of one dataset.
        device: that the model is on.
        batch_size: sequences of a forward pass.
        max_sequences: no more than so many; all when None.
        report: told how many of how many sequences are done.
    """
    total = source.num_samples or 0
    total = total if max_sequences is None else min(total, max_sequences)
    sums = torch.zeros(1 + model.mtp_depths, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    for first, size in _batches(total, batch_size):
        batch = source.micro_batch(first, size).to(device)
        sums += model(batch).double().cpu()
        masks = [batch.loss_mask_BS, *(mtp_loss_mask(batch, depth) for depth in range(1, model.mtp_depths + 1))]
        counts += torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.float64)
        report(first + size, total)
    lm, *mtp = (sums / counts).tolist()  # NaN without a target
    (dataset,) = source.datasets
    return Evaluation(dataset.path, int(counts[0]), lm, tuple(mtp), bits_per_byte(lm, source.bytes_per_token))


def _batches(total: int, size: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, size):
        yield first, min(size, total - first)
