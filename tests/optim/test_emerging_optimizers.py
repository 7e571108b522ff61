"""The orthogonalisation against NVIDIA's emerging-optimizers, where definitions coincide (Python 3.12 only)."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from steptron_kernels.polar_express import plain
from steptron_kernels.polar_express.choose import choose
from steptron_kernels.polar_express.coefficients import polar_express_rows
from tests.optim import polar_reference as reference

pytestmark = pytest.mark.py312

VERSIONS = {"plain": plain.polar_express, "chosen": choose(torch.device("cpu"), native=True)}


@pytest.fixture
def muon_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Their module; its Triton kernels, which CPU builds of torch come without, are not needed here."""
    monkeypatch.setitem(sys.modules, "emerging_optimizers.triton_kernels", ModuleType("triton_kernels"))
    return importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")


def test_table_is_theirs_to_the_digits_they_keep(muon_utils: ModuleType) -> None:
    theirs = muon_utils._COEFFICIENT_SETS["polar_express"]
    np.testing.assert_allclose(polar_express_rows(8), theirs, rtol=0, atol=1e-4)  # cut to four decimals, or rounded
    assert len(theirs) == 8


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", [(3, 32, 48), (2, 48, 32)])
@pytest.mark.parametrize("steps", [5, 6, 10])
def test_result_is_theirs(muon_utils: ModuleType, version: str, shape: tuple[int, ...], steps: int) -> None:
    """With their table, whose norm has no 1.01: our first row takes ours out again. Steps after the table's end repeat
    its last row in both."""
    m_NRC = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e4  # both epsilons vanish
    theirs_NRC = muon_utils.newton_schulz(m_NRC, steps, "polar_express")
    first, *rest = muon_utils.get_coefficient_iterator(
        steps, muon_utils._COEFFICIENT_SETS["polar_express"], mode="repeat_last"
    )
    ours_NRC, _ = VERSIONS[version](m_NRC, [reference.shrunk(first, 1 / 1.01), *rest], torch.float32)
    torch.testing.assert_close(ours_NRC, theirs_NRC, rtol=0, atol=3e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_our_own_rows_and_norm_lie_near_theirs(muon_utils: ModuleType, version: str) -> None:
    """Both end at the polar factor: they differ by the 1.01 of the norm and the digits of their table."""
    m_NRC = torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(1))
    ours_NRC, _ = VERSIONS[version](m_NRC, polar_express_rows(8), torch.float32)
    torch.testing.assert_close(ours_NRC, muon_utils.newton_schulz(m_NRC, 8, "polar_express"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_bfloat16_is_their_medium_precision(
    muon_utils: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Theirs leaves it to torch where a step is rounded: a few units of bfloat16."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    m_NRC = torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(2))
    theirs_NRC = muon_utils.newton_schulz(m_NRC, 6, "polar_express")
    ours_NRC, _ = VERSIONS[version](m_NRC, polar_express_rows(6), torch.bfloat16)
    assert (ours_NRC - theirs_NRC).norm() / theirs_NRC.norm() < 8 * 2.0**-8
