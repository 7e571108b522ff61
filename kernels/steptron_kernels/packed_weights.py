"""Weights in the layout that the native products read, made once per change of the weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Products = Literal["fp32", "bf16"]
"""dtype of the operands of matrix products on float32 tensors; sums are always float32."""


@dataclass
class _Entry:
    version: int
    packed: dict[bool, Tensor] = field(default_factory=dict)


class PackedWeights:
    """Packed copies of weight matrices [..., N, K], by weight.

    A copy is made at the first use after the weight was changed, which torch's version counter tells: every in-place
    operation counts, writing through ``weight.data`` does not and must not be done.
    """

    def __init__(self, products: Products) -> None:
        self.in_bf16 = products == "bf16"
        self._entries = WeakIdKeyDictionary()

    def transposed(self, weight: Tensor) -> Tensor:
        """Right operand of ``x W^T``."""
        return self._get(weight, transposed=True)

    def plain(self, weight: Tensor) -> Tensor:
        """Right operand of ``dy W``: in float32 the matrices [..., N, K] themselves."""
        return self._get(weight, transposed=False) if self.in_bf16 else weight.detach().contiguous()

    def _get(self, weight: Tensor, transposed: bool) -> Tensor:
        entry = self._entries.get(weight)
        if entry is None or entry.version != weight._version:
            entry = self._entries[weight] = _Entry(weight._version)
        if transposed not in entry.packed:
            entry.packed[transposed] = torch.ops.steptron_kernels.pack_weight(
                weight.detach().contiguous(), transposed, self.in_bf16
            )
        return entry.packed[transposed]
