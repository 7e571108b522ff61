"""The model is the released one: a tiny case with right answers.

The case (tests/data/step3p5) was computed in float64 from the mathematics and has every feature on. That each way to
get the model wrong would show is tested with the reference (test_reference.py).
"""

from __future__ import annotations

import pytest
import torch

from steptron.model.assembly import StepModel
from steptron.train.losses import TokenCounts
from steptron_kernels.select import PLAIN, Kernels
from tests.model.helpers import assert_all_close, build_model, gradients, watch_selection_gaps
from tests.model.released import (
    NEAR_TIE,
    case_logits,
    case_losses,
    expected,
    expected_gradients,
    load_released,
    released_config,
    released_weights,
    split_released,
)


def case_model(kernels: Kernels = PLAIN) -> StepModel:
    model = build_model(released_config(), kernels=kernels)
    load_released(model, released_weights())
    return model


def test_every_released_tensor_is_used_once() -> None:
    model, weights = build_model(released_config()), released_weights()
    assert load_released(model, weights) == weights.keys()
    assert sum(tensor.numel() for tensor in weights.values()) == sum(
        tensor.numel() for _, tensor in model.logical_tensors()
    )


def test_no_selection_is_a_near_tie() -> None:
    model = case_model()
    gaps = watch_selection_gaps(model)
    case_logits(model, expected()["input_ids"])
    assert len(gaps) == 6 and min(gaps) >= NEAR_TIE


def test_logits(kernels: Kernels) -> None:
    right = expected()
    main, mtp = case_logits(case_model(kernels), right["input_ids"])
    torch.testing.assert_close(main, right["logits"], rtol=0, atol=1e-4)
    torch.testing.assert_close(mtp, right["mtp_logits"], rtol=0, atol=1e-4)


def test_losses(kernels: Kernels) -> None:
    right = expected()
    total, sums, counts = case_losses(case_model(kernels), right["input_ids"])
    assert counts == TokenCounts(80, (78, 76, 74, 72), (80,))
    means = sums.detach().double() / torch.tensor(counts.targets)
    assert means[0].item() == pytest.approx(right["lm_loss"].item(), rel=1e-6)
    assert means[1:].tolist() == pytest.approx(right["mtp_losses"].tolist(), rel=1e-6)
    assert total.item() == pytest.approx(right["total_loss"].item(), rel=1e-6)


def test_gradients(kernels: Kernels) -> None:
    model = case_model(kernels)
    case_losses(model, expected()["input_ids"])[0].backward()
    own, right = split_released(model, gradients(model)), expected_gradients()
    assert len(right) == 186  # 192 tensors but for six selection biases
    assert_all_close(own, right, 1e-4)


def test_logits_of_a_prefix_are_a_prefix_of_the_logits() -> None:
    """Causality, across attention, routing and MTP."""
    model, ids = case_model(), expected()["input_ids"]
    whole, whole_mtp = case_logits(model, ids)
    part, part_mtp = case_logits(model, ids[:, :17])
    assert (whole[:, :17] - part).abs().max() < 1e-4
    for k in range(3):
        known = 17 - 1 - k  # tokens up to t + 1 + k are inputs
        assert (whole_mtp[k, :, :known] - part_mtp[k, :, :known]).abs().max() < 1e-4
