"""The float64 reference is the given case to the last digit; each way to get the model wrong shows, ours has none.

The table of wrong variants and its printed digits are those of section 5 of the facts of the release, which were
measured on the first of the case's two rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from steptron.config.schema import ModelConfig
from steptron_kernels.select import Kernels
from tests.model.helpers import assert_all_close, build_model, gradients, watch_selection_gaps
from tests.model.reference import RELEASED, Losses, Variant, forward, training_losses
from tests.model.released import (
    NEAR_TIE,
    case_logits,
    case_losses,
    config_json,
    expected,
    expected_gradients,
    load_released,
    released_config,
    released_weights,
    split_released,
)

TOLERANCE = 1e-4
"""Largest absolute difference of logits between float32 and float64, and relative one of gradients."""
FLOAT32_ROUNDING = 2.0**-24


@dataclass(frozen=True)
class Outcome:
    logits: Tensor
    mtp_logits: Tensor
    losses: Losses
    gradients: dict[str, Tensor]


def trained(name: str) -> bool:
    return not name.endswith("router_bias")


def case_ids(backwards: bool = False) -> Tensor:
    ids = expected()["input_ids"]
    return ids.flip(1) if backwards else ids


@cache
def reference(variant: Variant, backwards: bool = False) -> Outcome:
    """The case in float64."""
    weights = {name: tensor.double().requires_grad_(trained(name)) for name, tensor in released_weights().items()}
    ids = case_ids(backwards)
    logits, mtp_logits = forward(weights, config_json(), ids, variant)
    losses = training_losses(logits, mtp_logits, ids)
    losses.total.backward()
    grads = {name: tensor.grad for name, tensor in weights.items() if tensor.grad is not None}
    return Outcome(logits.detach(), mtp_logits.detach(), losses, grads)


@cache
def ours() -> tuple[Tensor, Tensor]:
    """Logits and MTP logits of our model, in float32."""
    model = build_model(released_config())
    load_released(model, released_weights())
    return case_logits(model, case_ids())


def largest_difference(actual: Tensor, right: Tensor) -> float:
    return float((actual - right).abs().max())


def cosine(actual: Tensor, right: Tensor) -> float:
    return float(F.cosine_similarity(actual.flatten(), right.flatten(), dim=0))


def rounds_to(value: float, printed: str) -> bool:
    """Whether a value could have been printed with these digits, to within one of the last."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 10.0**-digits


# ------------------------------------------------------------------------ the right variant


def test_logits_are_the_cases_to_float32_rounding() -> None:
    outcome, right = reference(RELEASED), expected()
    for actual, name in ((outcome.logits, "logits"), (outcome.mtp_logits, "mtp_logits")):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, right[name].double(), rtol=FLOAT32_ROUNDING, atol=1e-12)


def test_losses_are_the_cases() -> None:
    losses, right = reference(RELEASED).losses, expected()
    for actual, name in ((losses.lm, "lm_loss"), (losses.mtp, "mtp_losses"), (losses.total, "total_loss")):
        torch.testing.assert_close(actual.detach(), right[name].double(), rtol=1e-14, atol=0)


def test_gradients_are_the_cases_to_float32_rounding() -> None:
    actual, right = reference(RELEASED).gradients, expected_gradients()
    assert len(right) == 186
    assert_all_close(actual, right, FLOAT32_ROUNDING)


def test_ours_is_the_right_variant() -> None:
    outcome, (logits, mtp_logits) = reference(RELEASED), ours()
    assert largest_difference(logits, outcome.logits) <= TOLERANCE
    assert largest_difference(mtp_logits, outcome.mtp_logits) <= TOLERANCE


# ------------------------------------------------------------------------ the wrong variants


@dataclass(frozen=True)
class Wrong:
    """A wrong variant, and the printed difference and cosine of its logits."""

    variant: Variant
    largest: str
    cosine: str


WRONG = {
    "gamma instead of 1 + gamma": Wrong(Variant(norm_gain="weight"), "9.04", "-0.043"),
    "one theta on all layers": Wrong(Variant(theta=5e6), "5.22", "0.962"),
    "full rope on full layers": Wrong(Variant(full_rotary_fraction=1.0), "9.01", "0.624"),
    "no llama3 scaling": Wrong(Variant(scaled_layers="none"), "6.91", "0.722"),
    "scaling on all layers": Wrong(Variant(scaled_layers="all"), "4.98", "0.939"),
    "Megatron-Core's scaling constants": Wrong(Variant(scaling_constants="megatron_core"), "6.91", "0.722"),
    "interleaved rope": Wrong(Variant(rotary_pairs="interleaved"), "7.81", "0.681"),
    "no q/k norm": Wrong(Variant(query_key_norm="none"), "10.3", "0.266"),
    "rope before norm": Wrong(Variant(query_key_norm="after_rotation"), "4.81", "0.956"),
    "window + 1": Wrong(Variant(extra_window=1), "4.64", "0.920"),
    "no window": Wrong(Variant(extra_window=None), "5.87", "0.814"),
    "no head gate": Wrong(Variant(head_gate="none"), "12.8", "0.335"),
    "gate from residual": Wrong(Variant(head_gate="residual"), "7.50", "0.815"),
    "no clamp": Wrong(Variant(clamp="none"), "4.10", "0.936"),
    "clamp before silu": Wrong(Variant(clamp="before_silu"), "0.255", "0.9997"),
    "routed limit used for shared": Wrong(Variant(shared_limit="routed"), "2.02", "0.986"),
    "softmax router": Wrong(Variant(router_scores="softmax"), "7.01", "0.687"),
    "no selection bias": Wrong(Variant(selection_bias="none"), "5.58", "0.807"),
    "bias inside weights": Wrong(Variant(selection_bias="selection_and_weights"), "5.49", "0.918"),
    "no renormalisation": Wrong(Variant(renormalise=False), "7.86", "0.760"),
    "no x3.0": Wrong(Variant(scale_routed=False), "6.25", "0.799"),
    "x3.0 on shared too": Wrong(Variant(scale_shared=True), "7.10", "0.688"),
}
POST_NORM = Variant(mtp_input="post_norm", mtp_chain="post_norm")
MTP_WRONG = {
    "post-norm input and chain": (POST_NORM, {0, 1, 2}),
    "post-norm input, pre-norm chain": (Variant(mtp_input="post_norm"), {0, 1, 2}),
    "pre-norm input, post-norm chain": (Variant(mtp_chain="post_norm"), {1, 2}),
    "concat swapped": (Variant(mtp_order="hidden_embedding"), {0, 1, 2}),
    "main head": (Variant(mtp_head="main"), {0, 1, 2}),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_variant_shows_as_much_as_the_facts_say(wrong: Wrong) -> None:
    """Logits in float64 against the right ones; the comparison that we use refuses them by three decades."""
    actual, right = reference(wrong.variant), reference(RELEASED)
    first_row, right_row = actual.logits[0], right.logits[0]
    assert rounds_to(largest_difference(first_row, right_row), wrong.largest)
    assert rounds_to(cosine(first_row, right_row), wrong.cosine)
    for depth, right_depth in zip(actual.mtp_logits, right.mtp_logits, strict=True):
        assert largest_difference(depth, right_depth) > 1000 * TOLERANCE


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_ours_is_not_a_wrong_variant(wrong: Wrong) -> None:
    for row in (0, 1):
        distance = largest_difference(ours()[0][row], reference(wrong.variant).logits[row])
        assert distance > 1000 * TOLERANCE
        if row == 0:  # not near the wrong one: as far from it as the right one is
            assert rounds_to(distance, wrong.largest)


@pytest.mark.parametrize("variant, depths", MTP_WRONG.values(), ids=MTP_WRONG)
def test_a_wrong_mtp_variant_shows_and_is_not_ours(variant: Variant, depths: set[int]) -> None:
    actual, right, (_, our_mtp_logits) = reference(variant), reference(RELEASED), ours()
    assert torch.equal(actual.logits, right.logits)
    for k in range(3):
        shown = largest_difference(actual.mtp_logits[k], right.mtp_logits[k])
        seen = largest_difference(our_mtp_logits[k], actual.mtp_logits[k])
        assert (shown > 1) == (k in depths) == (seen > 1)
        if k not in depths:
            assert shown == 0


def test_wrong_mtp_variants_show_as_much_as_the_facts_say() -> None:
    right = reference(RELEASED).mtp_logits[:, 0]
    printed = [("2.09", "0.971"), ("4.29", "0.916"), ("6.21", "0.873")]
    for actual, right_depth, (largest, angle) in zip(
        reference(POST_NORM).mtp_logits[:, 0], right, printed, strict=True
    ):
        assert rounds_to(largest_difference(actual, right_depth), largest)
        assert rounds_to(cosine(actual, right_depth), angle)
    for name in ("concat swapped", "main head"):  # about 10, and about 0
        for actual, right_depth in zip(reference(MTP_WRONG[name][0]).mtp_logits[:, 0], right, strict=True):
            assert 9 < largest_difference(actual, right_depth) < 12
            assert abs(cosine(actual, right_depth)) < 0.1


def test_a_wrong_variant_has_wrong_gradients_too() -> None:
    right = reference(RELEASED).gradients
    for wrong in WRONG.values():
        actual = reference(wrong.variant).gradients
        shared = {name: actual[name] for name in right.keys() & actual.keys()}
        with pytest.raises(AssertionError, match=r"> 1e-02"):
            assert_all_close(shared, {name: right[name] for name in shared}, 1e-2)


def test_a_two_sided_clamp_is_the_same_function() -> None:
    """silu is above -0.2785, so that only a limit below that would cut its other side."""
    variant = Variant(clamp="after_silu_two_sided")
    actual, right = reference(variant), reference(RELEASED)
    assert torch.equal(actual.logits, right.logits) and torch.equal(actual.mtp_logits, right.mtp_logits)
    assert_all_close(actual.gradients, right.gradients, 0.0)

    small = config_json() | {"swiglu_limits": [0.2] * 12}
    weights, ids = {name: tensor.double() for name, tensor in released_weights().items()}, case_ids()
    two_sided, one_sided = forward(weights, small, ids, variant)[0], forward(weights, small, ids)[0]
    assert largest_difference(two_sided, one_sided) > TOLERANCE


# ------------------------------------------------------------------------ options of our model


OPTIONS: dict[str, tuple[dict[str, Any], Variant]] = {
    "a window of one key more": ({"sliding.window": 7}, Variant(extra_window=1)),
    "a window of one key less": ({"sliding.window": 5}, Variant(extra_window=-1)),
    "a window over all": ({"sliding.window": 40}, Variant(extra_window=None)),
    "one theta": ({"full.rope.theta": 1e4}, Variant(theta=1e4)),
    "full rope": ({"full.rope.rotary_fraction": 1.0}, Variant(full_rotary_fraction=1.0)),
    "no scaling": ({"full.rope.scaling": None}, Variant(scaled_layers="none")),
    "other constants of the scaling": (
        {"full.rope.scaling.high_freq_factor": 4.0, "full.rope.scaling.original_length": 8192},
        Variant(scaling_constants="megatron_core"),
    ),
    "scaling on all layers": (
        {"sliding.rope.scaling": {"factor": 2.0, "original_length": 64}},
        Variant(scaled_layers="all"),
    ),
    "no clamp": ({"clamp.routed": {}, "clamp.shared": {}}, Variant(clamp="none")),
    "a clamp before SiLU": ({"clamp.position": "before_silu"}, Variant(clamp="before_silu")),
    "other limits": ({"clamp.shared": {7: 1.0, 8: 1.0}}, Variant(shared_limit="routed")),
    "no factor 3": ({"moe.scaling_factor": 1.0}, Variant(scale_routed=False)),
    "no head gate": ({"layout": "S3F1+heads"}, Variant(head_gate="none")),
    "a post-norm chain": ({"mtp.chain": "post_norm"}, POST_NORM),
    "a shared MTP head": ({"mtp.head": "shared"}, Variant(mtp_head="main")),
}


def varied(changes: Mapping[str, Any]) -> ModelConfig:
    """The case's configuration with other values at dotted paths."""
    tree = released_config().model_dump()
    for path, value in changes.items():
        *parents, key = path.split(".")
        section = tree
        for parent in parents:
            section = section[parent]
        section[key] = value
    return ModelConfig.model_validate(tree)


@pytest.mark.parametrize("changes, variant", OPTIONS.values(), ids=OPTIONS)
def test_an_option_computes_what_it_says(changes: Mapping[str, Any], variant: Variant, kernels: Kernels) -> None:
    """Our model under an option is the reference under the same switch: logits, MTP logits and gradients.

    Rows are read backwards: as they stand, one of the variants comes to a near-tie of its routing.
    """
    model = build_model(varied(changes), kernels=kernels)
    load_released(model, released_weights())
    gaps = watch_selection_gaps(model)
    ids, right = case_ids(backwards=True), reference(variant, backwards=True)
    logits, mtp_logits = case_logits(model, ids)
    assert min(gaps) >= NEAR_TIE
    assert largest_difference(logits, right.logits) <= TOLERANCE
    assert largest_difference(mtp_logits, right.mtp_logits) <= TOLERANCE
    case_losses(model, ids)[0].backward()
    assert_all_close(split_released(model, gradients(model)), right.gradients, TOLERANCE)
