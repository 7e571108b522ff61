"""Peak bfloat16 speed of known GPUs, for MFU."""

from __future__ import annotations

import re

# Dense (no 2:4 sparsity) tensor-core TFLOP/s in bfloat16 with float32 accumulation, from the makers' data
# sheets; where a sheet gives the sparse figure only, half of it. A row is (words that the device's name must
# contain, TFLOP/s); the first row that fits wins, so variants stand before the plain name.
_PEAKS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in (
        # NVIDIA Blackwell architecture brief and data sheet: 4.5 PFLOP/s sparse per B200, 5 per GPU of a GB200.
        ("GB200", 2500.0),
        ("B200", 2250.0),
        # NVIDIA H200 data sheet: 1,979 TFLOP/s sparse (SXM), 1,671 (NVL).
        ("H200 NVL", 835.0),
        ("H200", 989.0),
        # NVIDIA GH200 Grace Hopper data sheet: 1,979 TFLOP/s sparse.
        ("GH200", 989.0),
        # NVIDIA H100 data sheet: 1,979 TFLOP/s sparse (SXM), 1,671 (NVL), 1,513 (PCIe).
        ("H100 NVL", 835.0),
        ("H100 PCIe", 756.0),
        ("H100", 989.0),
        # H800 and H20: the H100's successors for export, same compute for H800 (DeepSeek-V3 and StepFun train on it).
        ("H800 PCIe", 756.0),
        ("H800", 989.0),
        ("H20", 148.0),
        # NVIDIA A100 data sheet: 312 TFLOP/s, every form factor; A800 differs in NVLink only.
        ("A100", 312.0),
        ("A800", 312.0),
        # NVIDIA L40S, L4, A10 data sheets: 733 and 242 TFLOP/s sparse; 125 dense.
        ("L40S", 366.5),
        ("L4", 121.0),
        ("A10", 125.0),
        # AMD Instinct MI300X data sheet.
        ("MI300X", 1307.4),
    )
)


def bf16_peak_tflops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a device by the name that its driver reports (``torch.cuda.get_device_name``).

    Returns:
        TFLOP/s, or None where it is not known: CPUs, GPUs that are not listed, and MIG slices, which are
        a part of a GPU. ``train.peak_tflops`` sets it by hand.
    """
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    if "MIG" in words:
        return None
    for required, peak in _PEAKS:
        if required <= words:
            return peak
    return None
