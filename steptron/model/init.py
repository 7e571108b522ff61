"""Initial values.

Every logical matrix (and every single expert) is drawn from a generator seeded by the run's seed
and the matrix's name. Values therefore do not depend on the layout, on the order in which modules
are built, or on which parts a process holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch

from steptron.config.schema import InitConfig
from steptron.model.layer_spec import RESIDUAL_WRITERS, LogicalMatrix, ModelSpec, ParameterRole, ParameterSpec

_ZERO_ROLES = frozenset({ParameterRole.NORM, ParameterRole.SINK, ParameterRole.ROUTER_BIAS})


def standard_deviation(role: ParameterRole, config: InitConfig, num_layers: int) -> float:
    """Standard deviation of a matrix's initial values; 0 for norms (zero-centred), sinks and biases.

    Matrices that write into the residual stream are divided by sqrt(2 x layers) when
    ``scale_residual_by_depth`` is on (GPT-2's rule).
    """
    if role in _ZERO_ROLES:
        return 0.0
    by_role = {
        ParameterRole.EMBEDDING: config.embedding_std,
        ParameterRole.HEAD: config.head_std,
        ParameterRole.ROUTER: config.router_std,
    }
    std = by_role.get(role) or config.std
    if role in RESIDUAL_WRITERS and config.scale_residual_by_depth:
        std /= math.sqrt(2 * num_layers)
    return std


@torch.no_grad()
def initialise(
    tensors: Mapping[str, torch.Tensor],
    spec: ModelSpec,
    config: InitConfig,
    seed: int,
    expert_range: tuple[int, int],
) -> None:
    """Sets the initial values of the tensors that this process holds.

    Args:
        tensors: parameters and buffers by logical name (a subset of ``spec.parameters()``).
        spec: the whole model.
        config: standard deviations.
        seed: the run's seed.
        expert_range: first and one-past-last global expert held in the stacked expert tensors.
    """
    for parameter in spec.parameters():
        if parameter.name in tensors:
            _initialise_parameter(tensors[parameter.name], parameter, config, len(spec.layers), seed, expert_range)


def _initialise_parameter(
    tensor: torch.Tensor,
    parameter: ParameterSpec,
    config: InitConfig,
    num_layers: int,
    seed: int,
    expert_range: tuple[int, int],
) -> None:
    for matrix in parameter.matrices:
        std = standard_deviation(matrix.role, config, num_layers)
        for key, values in _slices(tensor, parameter, matrix, expert_range):
            if std == 0.0:
                values.zero_()
            else:
                generator = torch.Generator().manual_seed(_seed(seed, key))
                # Drawn in float32 on the CPU whatever the dtype and device: the same run everywhere.
                values.copy_(torch.empty(values.shape).normal_(0.0, std, generator=generator))


def _slices(
    tensor: torch.Tensor, parameter: ParameterSpec, matrix: LogicalMatrix, expert_range: tuple[int, int]
) -> Iterable[tuple[str, torch.Tensor]]:
    start, stop = matrix.rows
    if not parameter.is_expert:
        yield matrix.name, tensor[start:stop]
        return
    for local, expert in enumerate(range(*expert_range)):
        yield f"{matrix.name}[{expert}]", tensor[local, start:stop]


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
