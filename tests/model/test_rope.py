"""Rotary embeddings against complex multiplication, published figures and transformers."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7RotaryEmbedding, apply_rotary_pos_emb

from steptron.model.layer_spec import RopeScaling, RopeSpec
from steptron.model.rope import rope_frequencies, rope_tables
from steptron_kernels.qk_norm_rope.rope import apply_rope

RELEASE_SCALING = RopeScaling(factor=2.0, low_freq_factor=1.0, high_freq_factor=32.0, original_length=131072)
FULL = RopeSpec(theta=5e6, rotary_dim=64, scaling=RELEASE_SCALING)
SLIDING = RopeSpec(theta=1e4, rotary_dim=128, scaling=None)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def slow_rope(x_SBnD: Tensor, spec: RopeSpec, positions_BS: Tensor) -> Tensor:
    """Pair m as one complex number, multiplied by e^{i angle}; one Python number at a time."""
    out = x_SBnD.clone()
    half = spec.rotary_dim // 2
    for (s, b, n), _ in _entries(x_SBnD[..., 0]):
        for m in range(half):
            omega = spec.theta ** (-2.0 * m / spec.rotary_dim)
            if spec.scaling is not None:
                turns = spec.scaling.original_length * omega / (2 * math.pi)
                low, high = spec.scaling.low_freq_factor, spec.scaling.high_freq_factor
                share = min(1.0, max(0.0, (turns - low) / (high - low)))
                omega = omega * share + omega / spec.scaling.factor * (1 - share)
            pair = complex(x_SBnD[s, b, n, m], x_SBnD[s, b, n, m + half])
            turned = pair * cmath.exp(1j * omega * int(positions_BS[b, s]))
            out[s, b, n, m], out[s, b, n, m + half] = turned.real, turned.imag
    return out


def _entries(x: Tensor) -> Any:
    return (((s, b, n), x[s, b, n]) for s in range(x.shape[0]) for b in range(x.shape[1]) for n in range(x.shape[2]))


def test_scaling_gives_the_releases_frequencies() -> None:
    """facts of the release, 2.4: pairs 0-13 unchanged, 14-20 blended, 21-31 halved."""
    unscaled = rope_frequencies(RopeSpec(5e6, 64, None), torch.float64)
    torch.testing.assert_close(unscaled, 5e6 ** (-2.0 * torch.arange(32, dtype=torch.float64) / 64), rtol=1e-14, atol=0)
    ratio = rope_frequencies(FULL, torch.float64) / unscaled
    expected = [1.0] * 14 + [0.8785, 0.7275, 0.6343, 0.5768, 0.5413, 0.5193, 0.5058] + [0.5] * 11
    torch.testing.assert_close(ratio, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    "constants", [dict(high_freq_factor=4.0), dict(original_length=8192), dict(low_freq_factor=2.0), dict(factor=8.0)]
)
def test_every_constant_of_the_scaling_counts(constants: dict[str, Any]) -> None:
    changed = RopeScaling(**(vars(RELEASE_SCALING) | constants))
    ours = rope_frequencies(FULL, torch.float64)
    assert (rope_frequencies(RopeSpec(5e6, 64, changed), torch.float64) / ours - 1).abs().max() > 0.01


@pytest.mark.parametrize(
    "spec", [RopeSpec(5e6, 4, RopeScaling(2.0, 1.0, 32.0, 64)), RopeSpec(1e4, 8, None), RopeSpec(1e4, 2, None)]
)
def test_equals_complex_multiplication(spec: RopeSpec) -> None:
    x_SBnD = random(5, 2, 3, 8)
    positions_BS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 131071, 17]])
    rotated = apply_rope(x_SBnD, *rope_tables(spec, positions_BS, torch.float64))
    torch.testing.assert_close(rotated, slow_rope(x_SBnD, spec, positions_BS), rtol=0, atol=1e-10)
    assert torch.equal(rotated[..., spec.rotary_dim :], x_SBnD[..., spec.rotary_dim :])


def test_interleaved_pairs_would_be_seen() -> None:
    x_SBnD = random(3, 1, 1, 8)
    cos, sin = rope_tables(RopeSpec(1e4, 8, None), torch.arange(3)[None], torch.float64)
    even, odd = x_SBnD[..., 0::2], x_SBnD[..., 1::2]
    interleaved = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    assert (apply_rope(x_SBnD, cos, sin) - interleaved).abs().max() > 0.1


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = random(1, 1, 1, 128, seed=1), random(1, 1, 1, 128, seed=2)
    scores = []
    for shift in (0, 1000):
        turned = [
            apply_rope(x, *rope_tables(SLIDING, torch.tensor([[position + shift]]), torch.float64))
            for x, position in ((q, 37), (k, 5))
        ]
        scores.append(float((turned[0] * turned[1]).sum()))
    assert abs(scores[0] - scores[1]) < 1e-9
    assert abs(scores[0] - float((q * k).sum())) > 1e-3


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_gradients_are_those_of_finite_differences(rotary_dim: int) -> None:
    tables = rope_tables(RopeSpec(1e4, rotary_dim, None), torch.tensor([[0, 1, 2], [0, 0, 1]]), torch.float64)
    x = random(3, 2, 2, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, *tables), (x,), atol=1e-9, rtol=1e-7)


def test_strided_inputs_and_gradients() -> None:
    """Slices of a fused projection, and a gradient without memory of its own."""
    fused = random(4, 2, 30)
    tables = rope_tables(RopeSpec(1e4, 4, None), torch.arange(4)[None].expand(2, 4), torch.float64)
    view = fused[..., 6:22].unflatten(-1, (2, 8))
    rotated = apply_rope(view, *tables)
    assert rotated.is_contiguous()
    assert torch.equal(rotated, apply_rope(view.contiguous(), *tables))
    x = view.detach().clone().requires_grad_()
    apply_rope(x, *tables).sum().backward()
    inverse = apply_rope(torch.ones_like(x), tables[0], -tables[1])
    torch.testing.assert_close(x.grad, inverse, rtol=1e-14, atol=1e-14)


def test_more_rotated_dimensions_than_a_head_has_are_refused() -> None:
    with pytest.raises(ValueError, match="rotate 16 dimensions, but a head has 8"):
        apply_rope(random(1, 1, 1, 8), *rope_tables(RopeSpec(1e4, 16, None), torch.zeros(1, 1), torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_equals_transformers(kind: str, dtype: torch.dtype) -> None:
    config = Step3p7TextConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_attention_groups=1,
        head_dim=128,
        hidden_size=64,
        layer_types=["full_attention", "sliding_attention"],
        rope_theta=[5e6, 1e4],
        partial_rotary_factors=[0.5, 1.0],
        rope_scaling=dict(
            rope_type="llama3",
            factor=2.0,
            original_max_position_embeddings=131072,
            low_freq_factor=1.0,
            high_freq_factor=32.0,
        ),
        yarn_only_types=["full_attention"],
    )
    spec = FULL if kind == "full_attention" else SLIDING
    positions_BS = torch.tensor([[0, 1, 2, 100, 511, 4095], [0, 1, 0, 1, 2, 3]])
    q_SBnD, k_SBgD = random(6, 2, 2, 128, seed=1, dtype=dtype), random(6, 2, 1, 128, seed=2, dtype=dtype)
    their_cos, their_sin = Step3p7RotaryEmbedding(config)(q_SBnD, positions_BS, kind)
    theirs = apply_rotary_pos_emb(q_SBnD.permute(1, 2, 0, 3), k_SBgD.permute(1, 2, 0, 3), their_cos, their_sin)
    tables = rope_tables(spec, positions_BS, dtype)
    assert tables[0].dtype is dtype
    for ours, expected in zip((apply_rope(x, *tables) for x in (q_SBnD, k_SBgD)), theirs, strict=True):
        # The angle at position 4095 carries a rounding of 4095 x 2^-24 in both.
        tolerance = 5e-4 if dtype is torch.float32 else 0.04
        torch.testing.assert_close(ours, expected.permute(2, 0, 1, 3), rtol=0, atol=tolerance)
    if kind == "sliding_attention":  # the same arithmetic, bit for bit, where no scaling is in the way
        assert torch.equal(tables[0][:, :, 0], their_cos[..., :64].transpose(0, 1))
        assert torch.equal(tables[1][:, :, 0], their_sin[..., :64].transpose(0, 1))
