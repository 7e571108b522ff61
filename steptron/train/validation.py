"""Validation: mean losses over the first sequences of the validation split, always the same ones."""

from __future__ import annotations

import math

import torch

from steptron.config.schema import PretrainConfig
from steptron.data.samples import Samples
from steptron.parallel.mesh import Mesh
from steptron.train.feed import global_batch
from steptron.train.records import ValidationRecord
from steptron.train.step import TrainStep


def validate(config: PretrainConfig, source: Samples, step: TrainStep, mesh: Mesh, completed: int) -> ValidationRecord:
    """Evaluates the model. Collective.

    Args:
        config: the whole configuration.
        source: the validation data.
        step: holds the model.
        mesh: the process groups.
        completed: optimizer steps so far, for the record.
    """
    batch_size = config.train.global_batch_size
    available = -(-(source.num_samples or 0) // batch_size)
    sums = torch.zeros(1 + config.loss.mtp_train_depths, dtype=torch.float64)
    targets = torch.zeros_like(sums)
    for i in range(min(config.train.validation.batches, available)):
        batches = global_batch(source, i * batch_size, batch_size, config.train.micro_batch_size, mesh, step.device)
        batch_sums, counts = step.evaluate(batches)
        sums += batch_sums.cpu()
        targets += torch.tensor(counts.targets, dtype=torch.float64)
    lm, *mtp = (sums / targets).tolist()  # NaN without a target
    return ValidationRecord(completed, lm, tuple(mtp), lm / math.log(2) / source.bytes_per_token)
