"""What the training loop needs of an optimizer, and the fp32 weights behind bf16 parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from steptron.config.schema import OptimizerConfig
from steptron.model.layer_spec import ParameterRole, ParameterSpec


@dataclass(frozen=True)
class NamedParameter:
    """A trained parameter of this process: its spec (logical name, roles) and the tensor.

    ``tensor.main_grad`` holds its reduced fp32 gradient when the optimizer steps.
    """

    spec: ParameterSpec
    tensor: torch.nn.Parameter


def weight_decay(config: OptimizerConfig, role: ParameterRole) -> float:
    """Decoupled weight decay of a parameter.

    Norms (zero-centred, so that decay pulls gamma towards 1) and sinks decay only with ``decay_norms``.
    """
    undecayed = not config.decay_norms and role in (ParameterRole.NORM, ParameterRole.SINK)
    return 0.0 if undecayed else config.weight_decay


class Optimizer(Protocol):
    """Updates parameters from their ``main_grad``."""

    def step(self, lr: float) -> None:
        """One update at the given learning rate."""
        ...

    def state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """State tensors by kind (such as ``exp_avg``, ``master``) and parameter name, shaped as the
        parameter; loading a checkpoint writes into them in place."""
        ...

    @property
    def num_steps(self) -> int:
        """Updates made so far."""
        ...

    def set_num_steps(self, num_steps: int) -> None:
        """Continues from a checkpoint."""
        ...


class MasterWeights:
    """fp32 weights that the optimizer updates; the parameters themselves when those are fp32."""

    def __init__(self, parameters: list[NamedParameter]) -> None:
        self._parameters = parameters
        self.weights = [
            p.tensor.detach() if p.tensor.dtype is torch.float32 else p.tensor.detach().float() for p in parameters
        ]

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds updated weights into parameters of a narrower dtype."""
        for parameter, weight in zip(self._parameters, self.weights, strict=True):
            if parameter.tensor.dtype is not torch.float32:
                parameter.tensor.copy_(weight)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """``master`` weights that exist beside the parameters."""
        return {
            "master": {
                p.spec.name: w
                for p, w in zip(self._parameters, self.weights, strict=True)
                if p.tensor.dtype is not torch.float32
            }
        }
