"""Peaks by the names that drivers report."""

from __future__ import annotations

import pytest

from steptron.planning.peaks import bf16_peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H800", 989.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_devices(name: str, peak: float) -> None:
    assert bf16_peak_tflops(name) == peak


@pytest.mark.parametrize(
    "name",
    ["", "cpu", "AMD EPYC 9654 96-Core Processor", "NVIDIA A1000", "NVIDIA H2000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert bf16_peak_tflops(name) is None
