"""Micro-batches without a dataset."""

from __future__ import annotations

import torch

from steptron.config.schema import PretrainConfig
from steptron.data.batch import MicroBatch
from steptron.parallel.mesh import Mesh


def random_batches(config: PretrainConfig, mesh: Mesh) -> list[MicroBatch]:
    """Random micro-batches of one document per row, as many as a step of this data-parallel rank takes."""
    size, length = config.train.micro_batch_size, config.data.sequence_length
    generator = torch.Generator().manual_seed(mesh.data_rank)
    batches = []
    for _ in range(config.train.micro_batches(mesh.data_size)):
        stream = torch.randint(0, config.model.vocab_size, (size, length + 1), generator=generator)
        batches.append(
            MicroBatch(
                tokens_BS=stream[:, :-1].contiguous(),
                labels_BS=stream[:, 1:].contiguous(),
                loss_mask_BS=torch.ones(size, length, dtype=torch.bool),
                positions_BS=torch.arange(length).repeat(size, 1),
                documents_BS=torch.zeros(size, length, dtype=torch.int64),
            )
        )
    return batches
