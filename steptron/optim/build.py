"""The optimizer that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from steptron.config.schema import OptimizerConfig
from steptron.optim.adamw import AdamW
from steptron.optim.base import Optimizer
from steptron.optim.combined import Combined
from steptron.optim.muon import Muon
from steptron.optim.owned import OwnedPiece
from steptron.optim.rules import Algorithm
from steptron.optim.sgd import Sgd
from steptron_kernels.polar_express.choose import PolarExpress


def build_optimizer(
    config: OptimizerConfig,
    owned: Sequence[OwnedPiece],
    polar_express: PolarExpress,
    tensor_group: dist.ProcessGroup | None = None,
    deterministic: bool = False,
) -> Optimizer:
    """Builds the optimizer over what this process owns, each piece under the algorithm of its rule.

    Args:
        config: the optimizer.
        owned: what this process updates; may be nothing.
        polar_express: Muon's operation.
        tensor_group: tensor-parallel ranks.
        deterministic: Muon's batches have one fixed size.
    """

    def under(algorithm: Algorithm) -> list[OwnedPiece]:
        return [piece for piece in owned if piece.piece.rule.algorithm is algorithm]

    if config.name == "sgd":
        return Sgd(under(Algorithm.SGD))
    adamw = AdamW(config, under(Algorithm.ADAMW))
    if config.name == "adamw":
        return adamw
    return Combined([Muon(config.muon, under(Algorithm.MUON), polar_express, tensor_group, deterministic), adamw])
