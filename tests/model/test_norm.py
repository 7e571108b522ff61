"""ZeroCentredRMSNorm: its weight, and what it computes by default."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7RMSNorm

from steptron.model.norm import ZeroCentredRMSNorm

EPS = 1e-5


def make(size: int, dtype: torch.dtype) -> ZeroCentredRMSNorm:
    norm = ZeroCentredRMSNorm(size, EPS, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(0)) * 0.5)
    return norm


def test_starts_as_plain_rms_normalisation() -> None:
    norm = ZeroCentredRMSNorm(6, EPS)
    assert torch.equal(norm.weight, torch.zeros(6))
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    expected = x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
    torch.testing.assert_close(norm.double()(x), expected, rtol=1e-14, atol=0)


def test_equals_transformers() -> None:
    norm, theirs = make(32, torch.float32), Step3p7RMSNorm(32, eps=EPS)
    theirs.load_state_dict(norm.state_dict())
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(norm(x), theirs(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()), rtol=0.008, atol=0)


def test_the_version_of_the_operation_is_the_callers_choice() -> None:
    def other(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert weight is norm.weight and eps == 0.25
        return x + 1

    norm = ZeroCentredRMSNorm(3, 0.25, rms_norm=other)
    assert torch.equal(norm(torch.zeros(2, 3)), torch.ones(2, 3))


def test_can_be_built_without_memory() -> None:
    with torch.device("meta"):
        norm = ZeroCentredRMSNorm(4096, EPS, torch.bfloat16)
    assert norm.weight.is_meta and norm.weight.dtype is torch.bfloat16
