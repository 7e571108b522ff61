"""Weights in the layout that the native products read, made once per change of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Products = Literal["fp32", "bf16"]
"""dtype of the operands of matrix products on float32 tensors; sums are always float32."""


def weights_changed(weights: Sequence[Tensor]) -> None:
    """Tells packed copies that weights were written by something that torch's version counter does not see:
    a collective on the weight itself, torch's fused optimizers."""
    torch.autograd.graph.increment_version(weights)


@dataclass
class _Entry:
    version: int
    address: int
    packed: dict[bool, Tensor] = field(default_factory=dict)


class PackedWeights:
    """Packed copies of weight matrices [..., N, K], by weight.

    A copy is made at the first use after the weight was changed, which torch's version counter and the address of its
    storage tell. In-place operations, ``load_state_dict`` and a new ``weight.data`` count. What writes into the storage
    behind the counter's back has to say so (:func:`weights_changed`): collectives such as ``broadcast``, fused
    optimizers, in-place operations on ``weight.data``.
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
        if weight.is_inference():  # has no version
            return self._pack(weight, transposed)
        entry = self._entries.get(weight)
        if entry is None or (entry.version, entry.address) != (weight._version, weight.data_ptr()):
            entry = self._entries[weight] = _Entry(weight._version, weight.data_ptr())
        if transposed not in entry.packed:
            entry.packed[transposed] = self._pack(weight, transposed)
        return entry.packed[transposed]

    def _pack(self, weight: Tensor, transposed: bool) -> Tensor:
        packed: Tensor = torch.ops.steptron_kernels.pack_weight(weight.detach().contiguous(), transposed, self.in_bf16)
        return packed
