"""Validation: mean losses over the first sequences of each validation dataset, always the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steptron.config.schema import PretrainConfig
from steptron.data.names import short_names
from steptron.data.sampler import validation_datasets
from steptron.data.samples import Samples, bits_per_byte, weighted_mean
from steptron.data.sources import open_source
from steptron.parallel.mesh import Mesh
from steptron.train.feed import global_batch
from steptron.train.records import ValidationRecord
from steptron.train.step import TrainStep


@dataclass(frozen=True)
class Domain:
    """A dataset to validate on.

    Attributes:
        name: what it is called in records: the end of its path.
        weight: its share in the loss over all of them.
        source: its validation split.
    """

    name: str
    weight: float
    source: Samples


def open_domains(config: PretrainConfig) -> list[Domain]:
    """The datasets to validate on; none where there is nothing to validate on.

    Raises:
        DataError: a dataset that cannot be opened.
    """
    data = config.data
    datasets = validation_datasets(data)
    total = sum(dataset.weight for dataset in datasets)
    names = short_names([dataset.path for dataset in datasets])
    return [
        Domain(
            name,
            dataset.weight / total,
            open_source([dataset], "validation", data, config.parallel.timeout_seconds),
        )
        for name, dataset in zip(names, datasets, strict=True)
    ]


def unigram_entropy(domains: list[Domain]) -> float:
    """Nats per token that a model without context reaches when it knows each dataset's own token frequencies."""
    return sum(domain.weight * domain.source.unigram_entropy for domain in domains)


def validate(
    config: PretrainConfig, domains: list[Domain], step: TrainStep, mesh: Mesh, completed: int
) -> ValidationRecord:
    """Evaluates the model. Collective.

    Each dataset is evaluated on its share of ``train.validation.batches``, at least one batch; the losses are the means
    over the datasets by their weights.

    Args:
        config: the whole configuration.
        domains: the validation data; one at least.
        step: holds the model.
        mesh: the process groups.
        completed: optimizer steps so far, for the record.
    """
    losses = torch.stack([_losses(config, domain, step, mesh) for domain in domains])
    weights = torch.tensor([domain.weight for domain in domains], dtype=torch.float64)
    lm, *mtp = (weights @ losses).tolist()
    bytes_per_token = weighted_mean(weights.tolist(), [domain.source.bytes_per_token for domain in domains])
    apart = dict(zip([domain.name for domain in domains], losses[:, 0].tolist(), strict=True))
    return ValidationRecord(
        completed, lm, tuple(mtp), bits_per_byte(lm, bytes_per_token), apart if len(domains) > 1 else {}
    )


def _losses(config: PretrainConfig, domain: Domain, step: TrainStep, mesh: Mesh) -> torch.Tensor:
    """Mean cross entropies [1 + depths] of a dataset, float64; NaN without a target."""
    train, source = config.train, domain.source
    available = -(-(source.num_samples or 0) // train.global_batch_size)
    batches = max(1, round(domain.weight * train.validation.batches))
    sums = torch.zeros(1 + config.loss.mtp_train_depths, dtype=torch.float64)
    targets = torch.zeros_like(sums)
    for i in range(min(batches, available)):
        first = i * train.global_batch_size
        batch = global_batch(source, first, train.global_batch_size, train.micro_batch_size, mesh, step.device)
        batch_sums, counts = step.evaluate(batch)
        sums += batch_sums.cpu()
        targets += torch.tensor(counts.targets, dtype=torch.float64)
    return sums / targets
