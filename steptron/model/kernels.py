"""The operations that a run uses, as its configuration says."""

from __future__ import annotations

import torch

from steptron.config.schema import ParallelConfig, TrainConfig
from steptron.errors import UserError
from steptron.model.transformer_config import DTYPES
from steptron.platform.distributed import gather_to_all
from steptron_kernels import extension
from steptron_kernels.select import Kernels, KernelsUnavailableError, select


def choose_kernels(train: TrainConfig, parallel: ParallelConfig, device: torch.device) -> Kernels:
    """Chooses by ``train.kernels``, ``train.products`` and ``train.precision``, alike on all ranks: all call this.

    Linear layers that tensor parallelism cuts, and the loss, are torch operations whatever is chosen; ``products:
    auto`` then means fp32 everywhere.

    Raises:
        UserError: on every rank: what is asked for is not to be had on some of them, or their machines choose
            differently where the configuration says auto.
    """
    kernels, problem = None, ""
    try:
        products = "fp32" if train.products == "auto" and parallel.tensor > 1 else train.products
        kernels = select(train.kernels, products, device, DTYPES[train.precision])
    except KernelsUnavailableError as error:
        problem = str(error)
    choice = f"{kernels.name} with {kernels.products} products" if kernels is not None else problem
    answers = gather_to_all((choice, kernels is None))
    ranks: dict[tuple[str, bool], list[int]] = {}
    for rank, answer in enumerate(answers):
        ranks.setdefault(answer, []).append(rank)
    if kernels is not None and len(ranks) == 1:
        return kernels
    fields = f"train.kernels: {train.kernels}, train.products: {train.products}"
    failed = [(text, where) for (text, is_problem), where in ranks.items() if is_problem]
    if failed:
        text, where = failed[0]
        on = f" (rank {', '.join(map(str, where))})" if len(answers) > 1 else ""
        raise UserError(f"{fields}: {text}{on}")
    listed = "; ".join(f"{text} on rank {', '.join(map(str, where))}" for (text, _), where in ranks.items())
    raise UserError(
        f"{fields}: the machines of this run choose different operations ({listed}): set both to values that all serve"
    )


def describe_kernels(kernels: Kernels, train: TrainConfig, parallel: ParallelConfig) -> str:
    """What computes, in words; where native operations would have been taken but are not there, why."""
    if kernels.name == "native":
        but = "; linear layers and the loss are torch's, for tensor parallelism" if parallel.tensor > 1 else ""
        return f"native operations, {kernels.products} products{but}"
    if train.kernels == "auto" and train.precision == "fp32" and (reason := extension.why_unavailable()) is not None:
        return f"plain torch operations: {reason}"
    return "plain torch operations"
