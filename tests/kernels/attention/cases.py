"""Attention problems that the tests of its versions share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from steptron_kernels.attention.plain import dense_masked_attention, visible_keys


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor
    d_output: Tensor

    @classmethod
    def random(cls, S: int, B: int, n: int, g: int, D: int, seed: int = 0, keys: int | None = None) -> Case:
        generator = torch.Generator().manual_seed(seed)
        T = S if keys is None else keys
        shapes = [(S, B, n, D), (T, B, g, D), (T, B, g, D), (n,), (S, B, n, D)]
        return cls(*(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes))

    def to(self, dtype: torch.dtype) -> Case:
        return Case(*(tensor.to(dtype) for tensor in vars(self).values()))

    def run(self, function: Callable[..., Tensor], sink: bool) -> list[Tensor]:
        """Output and the gradients of q, k, v and the sink."""
        leaves = [x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v, self.sink)]
        output = function(*leaves[:3], leaves[3] if sink else None)
        output.backward(self.d_output)
        gradients = [leaf.grad for leaf in leaves[: 4 if sink else 3]]
        assert all(gradient is not None for gradient in gradients)
        return [output.detach(), *gradients]  # type: ignore[list-item]


def ragged_documents(S: int, B: int, seed: int) -> Tensor:
    """Documents of random lengths, then padding in some rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(B):
        begins = torch.rand(S, generator=generator) < 3.0 / S
        documents = begins.long().cumsum(0)
        padding = int(torch.randint(0, S // 3 + 1, (1,), generator=generator)) if row % 2 else 0
        documents[S - padding :] = -1
        rows.append(documents)
    return torch.stack(rows)


def dense(window: int | None, documents: Tensor | None) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        return dense_masked_attention(q, k, v, visible_keys(len(q), len(k), window, documents), sink)

    return function


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))
