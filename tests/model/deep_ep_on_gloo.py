"""What Megatron-Core's flex dispatcher calls of DeepEP, over gloo: the contract of its high-throughput buffer.

A token goes once to each rank that holds any of its experts; there the numbers of its experts count from the
rank's first one, others are -1 with weight 0. Combining adds up what each of these ranks sends back, without
weights (documentation of ``deep_ep.Buffer``, ``dispatch`` and ``combine``).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher


class _Handle(NamedTuple):
    source_rows: torch.Tensor
    """[sent] the token of each row, sorted by target rank."""
    sent: list[int]
    received: list[int]


class _Event:
    def __init__(self, *_: Any) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass


class _Sizes:
    def get_nvl_buffer_size_hint(self, *_: int) -> int:
        return 1

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    """Of the arguments, those about streams and events are left out: gloo waits."""

    num_sms = 0

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @classmethod
    def set_num_sms(cls, number: int) -> None:
        cls.num_sms = number

    @staticmethod
    def get_dispatch_config(_: int) -> _Sizes:
        return _Sizes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        rank_TK = topk_idx // (num_experts // self.group.size())
        in_rank_TR = torch.stack([(rank_TK == rank).any(1) for rank in range(self.group.size())], 1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        return in_rank_TR.sum(0), None, per_expert, in_rank_TR, _Event()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: _Handle | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        if handle is not None:
            return self._send(x[handle.source_rows], handle.sent, handle.received), None, None, None, None, _Event()
        assert topk_idx is not None and topk_weights is not None and topk_weights.dtype is torch.float32
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        sent_R = is_token_in_rank.sum(0)
        received_R = torch.empty_like(sent_R)
        dist.all_to_all_single(received_R, sent_R, group=self.group)
        rows = is_token_in_rank.t().nonzero()[:, 1]
        handle = _Handle(rows, sent_R.tolist(), received_R.tolist())
        recv_x, experts, weights = (
            self._send(part[rows], handle.sent, handle.received) for part in (x, topk_idx, topk_weights)
        )
        num_local = num_tokens_per_expert.numel() // self.group.size()
        local = experts - self.group.rank() * num_local
        elsewhere = (local < 0) | (local >= num_local)
        local, weights = local.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0.0)
        counts = torch.bincount(local[~elsewhere], minlength=num_local).tolist()
        return recv_x, local, weights, counts, handle, _Event()

    def combine(
        self, x: torch.Tensor, handle: _Handle, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        return self._add(x, handle), None if topk_weights is None else self._add(topk_weights, handle), _Event()

    def _add(self, rows: torch.Tensor, handle: _Handle) -> torch.Tensor:
        back = self._send(rows, handle.received, handle.sent)
        # Every token has an expert, so that the last one is sent somewhere.
        total = back.new_zeros(int(handle.source_rows.max()) + 1, back.shape[1])
        return total.index_add_(0, handle.source_rows, back)

    def _send(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Makes Megatron-Core believe that DeepEP is installed, and undoes it."""
    utils = types.ModuleType("deep_ep.utils")
    utils.EventHandle = utils.EventOverlap = _Event  # type: ignore[attr-defined]
    package = types.ModuleType("deep_ep")
    package.Buffer, package.utils = Buffer, utils  # type: ignore[attr-defined]
    sys.modules.update({"deep_ep": package, "deep_ep.utils": utils})
    try:
        _reload()
        yield
    finally:
        del sys.modules["deep_ep"], sys.modules["deep_ep.utils"]
        _reload()


def _reload() -> None:
    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
