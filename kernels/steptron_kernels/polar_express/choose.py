"""Which version of Polar Express an optimizer uses.

Apart from the choice for a model: the optimizer's matrices are float32 whatever the model's dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from steptron_kernels import extension
from steptron_kernels.polar_express import plain
from steptron_kernels.polar_express.coefficients import Row

PolarExpress = Callable[[Tensor, Sequence[Row], torch.dtype], tuple[Tensor, Tensor]]
"""As :func:`steptron_kernels.polar_express.plain.polar_express`."""


def choose(device: torch.device, native: bool) -> PolarExpress:
    """The version for float32 matrices on a device.

    Args:
        device: where the matrices are.
        native: whether to take the native version, on a CPU that it was built for.
    """
    if not native or device.type != "cpu" or extension.why_unavailable() is not None:
        return plain.polar_express
    from steptron_kernels.polar_express import native as native_version

    return native_version.polar_express
