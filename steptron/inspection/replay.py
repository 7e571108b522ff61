"""Sends tokens to the experts that another run chose.

Selecting experts is not continuous: where the k-th and the next score nearly tie, a rounding error sends a token
elsewhere, and everything after it differs. With the choices replayed, runs of different precision can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from steptron.errors import ConfigError
from steptron.inspection.archive import INPUT_IDS, open_archive
from steptron.inspection.cursor import NO_TOKEN
from steptron.model.layer_spec import ModelSpec, MoeFfnSpec
from steptron.model.router import Router, Routing


def experts_site(layer: int) -> str:
    """Name of the site that holds a layer's choices."""
    return f"layers.{layer}.ffn.router.experts"


def read_routing(path: Path, spec: ModelSpec, ids_BS: NDArray[np.int64]) -> dict[int, torch.Tensor]:
    """The recorded choices, int64 [B, S, K], of every MoE layer by its index.

    Raises:
        UserError: the file cannot be read.
        ConfigError: the trace is of other tokens, lacks layers, or is of another shape; every problem is listed.
    """
    problems, experts = [], {}
    with open_archive(path) as trace:
        if INPUT_IDS in trace and not np.array_equal(trace.read(INPUT_IDS), ids_BS):
            problems.append(f"{INPUT_IDS} are other ones than this run's: record the trace with the same --input-ids")
        for layer in spec.moe_layers:
            assert isinstance(layer.ffn, MoeFfnSpec)
            name, shape = experts_site(layer.index), (*ids_BS.shape, layer.ffn.top_k)
            if name not in trace:
                problems.append(
                    f"{name} is missing: record it with --only 'layers.*.ffn.router.experts' or without --only"
                )
                continue
            values = trace.read(name)
            if values.shape != shape or values.dtype.kind not in "iu":
                problems.append(f"{name} is {values.dtype} {list(values.shape)}, this run needs int64 {list(shape)}")
            elif values.min() < 0 or values.max() >= layer.ffn.num_experts:
                problems.append(f"{name} names experts outside 0 to {layer.ffn.num_experts - 1}")
            elif (np.diff(np.sort(values, axis=-1), axis=-1) == 0).any():
                problems.append(f"{name} names an expert twice for one token")
            else:
                experts[layer.index] = torch.from_numpy(values.astype(np.int64))
    if problems:
        raise ConfigError(f"--replay-routing {path}", problems)
    return experts


@contextmanager
def replay_routing(
    routers: Mapping[int, Router],
    experts: Mapping[int, torch.Tensor],
    take: Callable[[torch.Tensor], torch.Tensor] = lambda experts: experts,
) -> Iterator[None]:
    """Within it, routers send tokens to recorded experts, weighted by their own scores of this run.

    Args:
        routers: of this process, by layer index.
        experts: recorded choices by layer index, int64.
        take: of a layer's choices those [T, K] of the tokens in hand; a token whose choices are ``NO_TOKEN`` (padding)
            goes where the router sends it. By default the choices are just those [T, K].

    Raises:
        KeyError: a router's layer has no recorded choices.
    """
    handles = [
        router.register_forward_hook(_hook(router.spec.scaling_factor, experts[index], take))
        for index, router in routers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def weigh(scores_TE: torch.Tensor, experts_TK: torch.Tensor, scaling: float) -> torch.Tensor:
    """Weights [T, K] of given experts: their scores, renormalised and scaled (as ``steptron_kernels.route.plain``)."""
    selected_TK = scores_TE.gather(1, experts_TK)
    return selected_TK / (selected_TK.sum(dim=-1, keepdim=True) + 1e-20) * scaling


def replayed(own_TK: torch.Tensor, recorded_TK: torch.Tensor) -> torch.Tensor:
    """The recorded experts where there are some, a run's own elsewhere.

    Raises:
        ValueError: they are of another shape.
    """
    if recorded_TK.shape != own_TK.shape:
        raise ValueError(f"recorded experts have shape {list(recorded_TK.shape)}, the router's {list(own_TK.shape)}")
    recorded_TK = recorded_TK.to(own_TK.device)
    return torch.where(recorded_TK == NO_TOKEN, own_TK, recorded_TK)


def _hook(
    scaling: float, experts: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.nn.Module, object, Routing], Routing]:
    def hook(_: torch.nn.Module, __: object, routing: Routing) -> Routing:
        experts_TK = replayed(routing.experts_TK, take(experts))
        return Routing(experts_TK, weigh(routing.scores_TE, experts_TK, scaling), routing.scores_TE)

    return hook
