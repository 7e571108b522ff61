"""One packed frame per rank and step: what was measured, brought from the device at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steptron_metrics.protocol.description import Series


@dataclass(frozen=True)
class Measured:
    """Values of consecutive series, float32 on the device, in the order of the series."""

    series: Sequence[Series]
    values: Tensor


def transfer(measured: Sequence[Measured]) -> Callable[[], np.ndarray]:
    """Starts to bring all values to the host in one copy.

    Returns:
        What waits for them: float32, one after the other. Where they come from a GPU, call it once the next step has
        been queued, so that nothing waits.
    """
    parts = [part.values.reshape(-1) for part in measured]
    if not parts:
        return lambda: np.empty(0, np.float32)
    packed = torch.cat([part.to(torch.float32) for part in parts])
    if packed.device.type != "cuda":
        return packed.numpy
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> np.ndarray:
        arrived.synchronize()
        array: np.ndarray = host.numpy()
        return array

    return wait
