"""Runs the tiny case; the functions are called in worker processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steptron.checkpoint.weights import open_weights
from steptron.inspection.archive import INPUT_IDS, write_arrays
from steptron.inspection.configuration import overridden, run_config
from steptron.inspection.forward import LoadedModel, load_model
from steptron.inspection.logits import logits
from steptron.inspection.sites import choose, sites
from steptron.inspection.trace import trace
from tests.model.reference import forward
from tests.model.released import CASE, config_json, expected, released_weights

Arrays = dict[str, NDArray[Any]]
LAYOUTS = {
    "one process": (1, []),
    "PP2": (2, ["parallel.pipeline=2"]),
    "EP2": (2, ["parallel.expert=2"]),
    "TP2": (2, ["parallel.tensor=2"]),
    "CP2": (2, ["parallel.context=2"]),
    "DP2": (2, []),
    "PP2xEP2": (4, ["parallel.pipeline=2", "parallel.expert=2"]),
    "TP2xEP2": (2, ["parallel.tensor=2", "parallel.expert=2"]),
    "PP2xVPP2": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    "CP2xTP2": (4, ["parallel.context=2", "parallel.tensor=2"]),
    "PP2, stages without layers": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2",
                                       "parallel.pipeline_layout=E|tttttt|ttt|mmmL"]),
}  # fmt: skip


def case_ids() -> torch.Tensor:
    return expected()["input_ids"]


def odd_ids() -> torch.Tensor:
    """Three rows of 37 tokens: no layout of more than one process shares them evenly."""
    ids = case_ids()
    return torch.cat([ids, ids[:1].flip(1)])[:, :37].contiguous()


def reference_logits(ids_BS: torch.Tensor) -> Arrays:
    """In float64, from the mathematics."""
    weights = {name: tensor.double() for name, tensor in released_weights().items()}
    main, mtp = forward(weights, config_json(), ids_BS)
    return {"logits": main.numpy(), "mtp_logits": mtp.numpy()}


def load(folder: Path, world_size: int, overrides: Sequence[str], precision: str) -> LoadedModel:
    weights = open_weights(folder)
    config = run_config(overridden(weights.model, overrides), precision, world_size)
    return load_model(weights, config, torch.device("cpu"))


def run_logits(
    rank: int,
    world_size: int,
    overrides: Sequence[str],
    ids_BS: torch.Tensor,
    precision: str = "fp32",
    experts: Mapping[int, torch.Tensor] | None = None,
    folder: Path = CASE,
) -> Arrays:
    return dict(logits(load(folder, world_size, overrides, precision), ids_BS, experts))


def run_trace(
    rank: int,
    world_size: int,
    overrides: Sequence[str],
    ids_BS: torch.Tensor,
    patterns: Sequence[str] = (),
    experts: Mapping[int, torch.Tensor] | None = None,
    precision: str = "fp32",
) -> Arrays:
    model = load(CASE, world_size, overrides, precision)
    return dict(trace(model, ids_BS, choose(sites(model.chunks.spec), patterns), experts))


def write_trace(path: Path, ids_BS: torch.Tensor, values: Mapping[str, NDArray[Any]]) -> Path:
    write_arrays(path, [(INPUT_IDS, ids_BS.numpy()), *values.items()])
    return path


def shifted(values: Mapping[str, NDArray[Any]]) -> dict[int, torch.Tensor]:
    """Other experts than a trace's: to each token of the case the next ones."""
    return {
        int(name.split(".")[1]): torch.from_numpy(np.sort((value + 1) % 8, axis=-1))
        for name, value in values.items()
        if name.endswith("router.experts")
    }


def relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))
