"""Parameters of one process as optimizers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steptron.config.schema import OptimizerConfig
from steptron.model.layer_spec import ParameterSpec
from steptron.model.parameter_shards import Place, shard
from steptron.optim.base import Optimizer
from steptron.optim.buffer_plan import plan_buffers
from steptron.optim.owned import OwnedPiece
from steptron.parallel.gradient_buffer import GradientBuffer


def own(
    specs: Sequence[ParameterSpec], parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig
) -> list[OwnedPiece]:
    """All of some parameters, in their order where each is one piece; sets their ``main_grad``."""
    plans = plan_buffers([shard(spec, Place()) for spec in specs], config, 1, {"dp_cp": 1, "expt_dp": 1})
    owned = []
    for plan in plans:
        GradientBuffer(plan, parameters)
        for piece in plan.pieces:
            parameter, run = parameters[piece.shard.parameter.name], slice(piece.start, piece.stop)
            gradient = parameter.main_grad.view(-1)[run]  # type: ignore[attr-defined]
            owned.append(OwnedPiece(piece, parameter.detach().view(-1)[run], gradient))
    place = {spec.name: index for index, spec in enumerate(specs)}
    return sorted(owned, key=lambda own: (place[own.piece.shard.parameter.name], own.piece.start))


def state_of(optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """State tensors by kind and piece; the optimizer's own, to be written into."""
    return {kind: {state.owned.name: state.tensor for state in tensors} for kind, tensors in optimizer.state().items()}
