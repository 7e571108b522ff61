"""The tiny case of ``tests/data/step3p5``, and models whose weights are dicts under the released names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from steptron.checkpoint.released.model_config import read_model_config
from steptron.checkpoint.released.names import ReleasedTensor, released_tensors
from steptron.config.schema import LossConfig, ModelConfig
from steptron.data.batch import MicroBatch
from steptron.model.assembly import StepModel
from steptron.model.layer_spec import ModelSpec, ParameterRole
from steptron.model.sequence import shift_left
from steptron.train.losses import TokenCounts, count_tokens, loss_coefficients
from tests.model.helpers import single_process

CASE = Path(__file__).resolve().parents[1] / "data" / "step3p5" / "tiny"
NEAR_TIE = 1e-6
"""Selections closer than this may flip in float32 (facts of the release)."""


def config_json() -> dict[str, Any]:
    """The case's config.json."""
    content: dict[str, Any] = json.loads((CASE / "config.json").read_text())
    return content


def released_config(**changes: Any) -> ModelConfig:
    """The case's config.json as a model configuration; changes replace whole fields."""
    config = read_model_config(config_json(), str(CASE / "config.json"))
    return ModelConfig.model_validate(dict(config) | changes)


def released_weights() -> dict[str, torch.Tensor]:
    return load_file(CASE / "model.safetensors")


def expected() -> dict[str, torch.Tensor]:
    with np.load(CASE / "expected.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


def expected_gradients() -> dict[str, torch.Tensor]:
    with np.load(CASE / "grads.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays}


@torch.no_grad()
def load_released(model: StepModel, weights: Mapping[str, torch.Tensor]) -> set[str]:
    """Copies released tensors into a whole model; returns the released names that were read.

    Output matrices of MTP depths that share the main model's are not read.
    """
    tensors, read = dict(model.logical_tensors()), set()
    for released in _own_tensors(model.spec):
        _rows(tensors, released).copy_(weights[released.name])
        read.add(released.name)
    return read


def split_released(model: StepModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by logical name (such as gradients) under released names."""
    return {
        released.name: _rows(tensors, released)
        for released in _own_tensors(model.spec)
        if released.parameter.name in tensors
    }


def random_weights(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 tensors under the released names, large enough that every feature matters."""
    generator = torch.Generator().manual_seed(seed)
    scale = {ParameterRole.EMBEDDING: 1.0, ParameterRole.NORM: 0.2, ParameterRole.ROUTER_BIAS: 0.3}
    return {
        released.name: torch.randn(released.shape, generator=generator) * scale.get(released.matrix.role, 0.25)
        for released in released_tensors(spec)
    }


def case_batch(input_ids_BS: torch.Tensor) -> MicroBatch:
    """Every token but the last of a row has a target; one document per row."""
    mask_BS = torch.ones_like(input_ids_BS, dtype=torch.bool)
    mask_BS[:, -1] = False
    positions_BS = torch.arange(input_ids_BS.shape[1]).expand_as(input_ids_BS)
    return MicroBatch(
        input_ids_BS, shift_left(input_ids_BS, 1, 0), mask_BS, positions_BS, torch.zeros_like(input_ids_BS)
    )


@torch.no_grad()
def case_logits(model: StepModel, input_ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Main logits [B, S, V] and MTP logits [depths, B, S, V] of a whole model."""
    logits = model.logits(case_batch(input_ids_BS))
    assert isinstance(logits, tuple)
    return logits


def case_losses(model: StepModel, input_ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, TokenCounts]:
    """Total loss, summed cross entropies and counts, as a training step combines them; every depth is trained."""
    config = LossConfig(mtp_weight=0.3, mtp_decay=0.6, mtp_train_depths=len(model.spec.mtp))
    batch = case_batch(input_ids_BS)
    counts = count_tokens([batch], config.mtp_train_depths, single_process().groups.dp_cp)
    sums = model(batch)
    return torch.dot(sums, torch.tensor(loss_coefficients(config, counts))), sums, counts


def _own_tensors(spec: ModelSpec) -> list[ReleasedTensor]:
    """Released tensors, each logical matrix once: a main output matrix that the MTP depths share stands first."""
    by_matrix: dict[str, ReleasedTensor] = {}
    for released in released_tensors(spec):
        by_matrix.setdefault(released.matrix.name, released)
    return list(by_matrix.values())


def _rows(tensors: Mapping[str, torch.Tensor], released: ReleasedTensor) -> torch.Tensor:
    tensor, rows = tensors[released.parameter.name], slice(*released.matrix.rows)
    return tensor[:, rows] if released.parameter.is_expert else tensor[rows]
