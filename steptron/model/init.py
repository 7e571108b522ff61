"""Initial values.

Every logical matrix (and every single expert) is drawn from a generator seeded by the run's seed
and the matrix's name. Values therefore do not depend on the layout, on the order in which modules
are built, or on which parts a process holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

from steptron.config.schema import InitConfig
from steptron.model.layer_spec import RESIDUAL_WRITERS, ModelSpec, ParameterRole, ParameterSpec
from steptron.model.parameter_shards import MatrixShard, Place, shard

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
        ParameterRole.VALUE_HEAD: config.value_head_std,
    }
    std = by_role.get(role) or config.std
    if role in RESIDUAL_WRITERS and config.scale_residual_by_depth:
        std /= math.sqrt(2 * num_layers)
    return std


@torch.no_grad()
def initialise(
    tensors: Mapping[str, torch.Tensor], spec: ModelSpec, config: InitConfig, seed: int, place: Place
) -> None:
    """Sets the initial values of the tensors that this process holds.

    Args:
        tensors: parameters and buffers by logical name (a subset of ``spec.parameters()``).
        spec: the whole model.
        config: standard deviations.
        seed: the run's seed.
        place: which part of each parameter the tensors are.
    """
    for parameter in spec.parameters():
        if parameter.name in tensors:
            for part in shard(parameter, place).matrices:
                std = standard_deviation(part.matrix.role, config, len(spec.layers))
                _initialise_matrix(tensors[parameter.name], parameter, part, std, seed)


def _initialise_matrix(
    tensor: torch.Tensor, parameter: ParameterSpec, part: MatrixShard, std: float, seed: int
) -> None:
    name, rows = part.matrix.name, slice(*part.rows)
    if std == 0.0:
        tensor[rows].zero_()
    elif parameter.is_expert:
        first, _ = part.range
        for local, values in enumerate(tensor[:, rows]):
            values.copy_(_draw(values.shape, std, seed, f"{name}[{first + local}]"))
    else:
        start, stop = part.matrix.rows
        whole = _draw((stop - start, *parameter.shape[1:]), std, seed, name)
        first, last = part.range
        tensor[rows].copy_(whole.narrow(part.axis, first, last - first))
        if not part.is_even:
            tensor[rows.stop :].zero_()


def _draw(shape: Sequence[int], std: float, seed: int, name: str) -> torch.Tensor:
    """Values of a whole matrix, in float32 on the CPU whatever the model's dtype and device: the same in every run."""
    generator = torch.Generator().manual_seed(_seed(seed, name))
    return torch.empty(*shape, device="cpu").normal_(0.0, std, generator=generator)


def _seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
