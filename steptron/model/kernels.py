"""The operations that a run uses, as its configuration says."""

from __future__ import annotations

import torch
import torch.distributed as dist

from steptron.config.schema import TrainConfig
from steptron.errors import UserError
from steptron.model.transformer_config import DTYPES
from steptron_kernels import extension
from steptron_kernels.select import Kernels, KernelsUnavailableError, select


def choose_kernels(train: TrainConfig, device: torch.device) -> Kernels:
    """Chooses by ``train.kernels``, ``train.products`` and ``train.precision``.

    Raises:
        UserError: what is asked for is not to be had here.
    """
    try:
        return select(train.kernels, train.products, device, DTYPES[train.precision])
    except KernelsUnavailableError as error:
        raise UserError(f"train.kernels: {train.kernels}, train.products: {train.products}: {error}") from None


def check_same_everywhere(kernels: Kernels) -> None:
    """Checks that all ranks have chosen alike: machines may differ where the configuration says auto.

    Raises:
        UserError: on every rank, naming the ranks and their choices.
    """
    choices: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(choices, (kernels.name, kernels.products))
    if len(set(choices)) > 1:
        ranks = {choice: [rank for rank, other in enumerate(choices) if other == choice] for choice in set(choices)}
        listed = "; ".join(
            f"{name} with {products} products on ranks {ranks[name, products]}" for name, products in ranks
        )
        raise UserError(
            f"the machines of this run choose different operations ({listed}): set train.kernels and train.products to "
            "values that all of them can serve"
        )


def describe_kernels(kernels: Kernels, train: TrainConfig) -> str:
    """What computes, in words; where native operations would have been taken but are not there, why."""
    if kernels.name == "native":
        return f"native operations, {kernels.products} products"
    if train.kernels == "auto" and train.precision == "fp32" and (reason := extension.why_unavailable()) is not None:
        return f"plain torch operations: {reason}"
    return "plain torch operations"
