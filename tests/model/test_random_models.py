"""Random tiny models: ours in float32 is the float64 reference, in every logit and every gradient."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from steptron.checkpoint.released.model_config import read_model_config
from steptron.model.layer_spec import model_spec
from steptron_kernels.select import Kernels
from tests.model.helpers import assert_all_close, build_model, gradients, watch_selection_gaps
from tests.model.random_models import random_config_json, random_ids
from tests.model.reference import RELEASED, Variant, forward, training_losses
from tests.model.released import (
    NEAR_TIE,
    case_logits,
    case_losses,
    load_released,
    random_weights,
    split_released,
)

SEEDS = range(16)
LOGITS_TOLERANCE = 5e-5
"""Largest absolute difference; 1.6e-5 was seen over 40 seeds."""
GRADIENT_TOLERANCE = 2e-5
"""Relative, per tensor; 4.6e-6 was seen over 40 seeds."""

# Every switch of the reference in one of its wrong positions.
SWITCHED = Variant(
    norm_gain="weight",
    theta=3e4,
    full_rotary_fraction=1.0,
    scaled_layers="none",
    scaling_constants="megatron_core",
    rotary_pairs="interleaved",
    query_key_norm="none",
    extra_window=1,
    head_gate="residual",
    clamp="before_silu",
    shared_limit="routed",
    router_scores="softmax",
    selection_bias="none",
    renormalise=False,
    scale_routed=False,
    scale_shared=True,
    mtp_input="post_norm",
    mtp_chain="post_norm",
    mtp_order="hidden_embedding",
    mtp_head="main",
)
SWITCHES = [field.name for field in fields(Variant)]


def drawn_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    config = read_model_config(random_config_json(seed), "random config.json")
    return {name: tensor.to(dtype) for name, tensor in random_weights(model_spec(config), seed).items()}


@pytest.mark.parametrize("seed", SEEDS)
def test_ours_is_the_reference(seed: int, kernels: Kernels) -> None:
    """Logits, MTP logits, loss and the gradient of every tensor."""
    raw, ids = random_config_json(seed), random_ids(random_config_json(seed), seed)
    weights = {
        name: tensor.requires_grad_(not name.endswith("router_bias"))
        for name, tensor in drawn_weights(seed, torch.float64).items()
    }
    logits, mtp_logits = forward(weights, raw, ids)
    losses = training_losses(logits, mtp_logits, ids)
    losses.total.backward()

    ours = build_model(read_model_config(raw, "random config.json"), kernels=kernels)
    assert load_released(ours, drawn_weights(seed)) == weights.keys()
    gaps = watch_selection_gaps(ours)
    own_logits, own_mtp_logits = case_logits(ours, ids)
    assert min(gaps) >= NEAR_TIE
    torch.testing.assert_close(own_logits.double(), logits, rtol=0, atol=LOGITS_TOLERANCE)
    torch.testing.assert_close(own_mtp_logits.double(), mtp_logits, rtol=0, atol=LOGITS_TOLERANCE)

    total = case_losses(ours, ids)[0]
    assert total.item() == pytest.approx(losses.total.item(), rel=1e-6)
    total.backward()
    right = {name: tensor.grad for name, tensor in weights.items() if tensor.grad is not None}
    assert len(right) == sum(tensor.requires_grad for tensor in weights.values())
    assert_all_close(split_released(ours, gradients(ours)), right, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_feature_shows_in_the_random_models(switch: str) -> None:
    """A mistake in any one of them would be seen by far, in several of the models."""
    variant = replace(RELEASED, **{switch: getattr(SWITCHED, switch)})
    assert variant != RELEASED
    shown = 0
    for seed in SEEDS[:8]:
        raw, weights = random_config_json(seed), drawn_weights(seed, torch.float64)
        ids = random_ids(raw, seed)
        right, actual = forward(weights, raw, ids), forward(weights, raw, ids, variant)
        shown += any(bool(((a - r).abs() > 100 * LOGITS_TOLERANCE).any()) for a, r in zip(actual, right, strict=True))
    assert shown >= 3
