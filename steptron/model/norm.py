"""Zero-centred RMSNorm with its weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from steptron.model.transformer_config import StepConfig
from steptron_kernels.rms_norm import plain


class ZeroCentredRMSNorm(nn.Module):
    """:func:`steptron_kernels.rms_norm.plain.rms_norm` over the last dimension, with its weight.

    The weight is gamma - 1 and starts at zero.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype | None = None,
        rms_norm: Callable[[Tensor, Tensor, float], Tensor] = plain.rms_norm,
    ) -> None:
        """
        Args:
            size: extent of the last dimension.
            eps: added to the mean square.
            dtype: dtype of the weight; torch's default when None.
            rms_norm: the version of the operation to call.
        """
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))
        self._rms_norm = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [..., size]; the result has the dtype of ``x``."""
        return self._rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def build_norm(size: int, eps: float, config: StepConfig) -> ZeroCentredRMSNorm:
    """A norm with the dtype and the operation of the model."""
    return ZeroCentredRMSNorm(size, eps, config.params_dtype, config.kernels.rms_norm)
