"""Which operations are chosen, and what is refused."""

from __future__ import annotations

import pytest
import torch

from steptron_kernels import extension, select
from steptron_kernels.select import PLAIN, KernelsUnavailableError

CPU = torch.device("cpu")


def test_auto_takes_native_for_fp32_on_cpu() -> None:
    chosen = select.select("auto", "fp32", CPU, torch.float32)
    assert (chosen.name, chosen.products) == ("native", "fp32")


@pytest.mark.parametrize(
    "device, dtype", [(CPU, torch.bfloat16), (CPU, torch.float64), (torch.device("cuda"), torch.float32)]
)
def test_native_serves_nothing_else(device: torch.device, dtype: torch.dtype) -> None:
    assert select.select("auto", "auto", device, dtype) is PLAIN
    with pytest.raises(KernelsUnavailableError, match=r"native kernels: they (run on the CPU|compute in float32)"):
        select.select("native", "auto", device, dtype)
    with pytest.raises(KernelsUnavailableError, match="bf16 products need the native kernels"):
        select.select("auto", "bf16", device, dtype)


def test_plain_is_plain() -> None:
    assert select.select("plain", "auto", CPU, torch.float32) is PLAIN
    with pytest.raises(KernelsUnavailableError, match="plain kernels were asked for"):
        select.select("plain", "bf16", CPU, torch.float32)


@pytest.mark.parametrize("flags, products", [({"avx512_bf16"}, "bf16"), ({"amx_bf16"}, "bf16"), ({"avx512f"}, "fp32")])
def test_auto_products_are_bf16_only_where_faster(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], products: str
) -> None:
    monkeypatch.setattr(extension, "cpu_flags", lambda: frozenset(flags))
    assert select.select("auto", "auto", CPU, torch.float32).products == products
    if products == "fp32":
        with pytest.raises(KernelsUnavailableError, match="AVX512-BF16 or AMX"):
            select.select("auto", "bf16", CPU, torch.float32)


def test_a_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "why_unavailable", lambda: "it was not built")
    assert select.select("auto", "auto", CPU, torch.float32) is PLAIN
    with pytest.raises(KernelsUnavailableError, match="native kernels: it was not built"):
        select.select("native", "fp32", CPU, torch.float32)


def test_every_model_packs_its_own_weights() -> None:
    assert select.native("fp32").linear is not select.native("fp32").linear
