"""Counts the bytes that this process hands to collectives and point-to-point operations, whoever issues them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steptron.parallel.traffic import CommunicationVolume, Kind, Traffic, wire_bytes

_KINDS = {
    "allreduce_": Kind.ALL_REDUCE,
    "allreduce_coalesced_": Kind.ALL_REDUCE,
    "allgather_": Kind.ALL_GATHER,
    "_allgather_base_": Kind.ALL_GATHER,
    "allgather_coalesced_": Kind.ALL_GATHER,
    "allgather_into_tensor_coalesced_": Kind.ALL_GATHER,
    "reduce_scatter_": Kind.REDUCE_SCATTER,
    "_reduce_scatter_base_": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": Kind.REDUCE_SCATTER,
    "alltoall_": Kind.ALL_TO_ALL,
    "alltoall_base_": Kind.ALL_TO_ALL,
    "broadcast_": Kind.BROADCAST,
    "reduce_": Kind.REDUCE,
    "gather_": Kind.GATHER,
    "scatter_": Kind.SCATTER,
    "send": Kind.SEND,
    "barrier": Kind.BARRIER,
    "monitored_barrier_": Kind.BARRIER,
}
"""By operator of torch's ``c10d`` library."""
_SILENT = frozenset({"recv_", "recv_any_source_", "check_for_nan"})
"""Operators that send nothing: what is received was counted where it was sent."""
_PAYLOADS: dict[Kind, tuple[str, ...]] = {
    Kind.ALL_GATHER: ("output_tensor", "output_tensors", "output_lists", "outputs"),
    Kind.REDUCE_SCATTER: ("input_tensor", "input_tensors", "inputs"),
    Kind.ALL_TO_ALL: ("input", "input_tensors"),
    Kind.GATHER: ("input_tensors",),
    Kind.SCATTER: ("input_tensors",),
    Kind.BARRIER: (),
}
"""Arguments whose tensors are the payload; of kinds that are not named, "tensors"."""


class CommunicationCounter(TorchDispatchMode):
    """Counts, while entered, every operation of torch's ``c10d`` library that this thread issues.

    Backward passes that this thread starts are included, on whichever thread autograd runs them, and so are
    operations of other libraries (Megatron-Core), asynchronous or not. Operations are counted when they are
    issued. Python sees every torch operation meanwhile, so that a step takes longer; nothing is computed
    differently.

    Args:
        names: names of process groups, by torch's ``group_name``; see :func:`group_names`. Groups without one
            go by their ranks.

    Raises:
        NotImplementedError: an operation of ``c10d`` is not known here, or is one of the functional collectives.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._names = dict(names or {})
        self._traffic: dict[tuple[str, Kind], Traffic] = {}

    @property
    def volume(self) -> CommunicationVolume:
        """What has been counted so far."""
        return CommunicationVolume(dict(self._traffic))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count(func, args, kwargs or {})
        elif func.namespace.startswith(("_c10d_functional", "c10d_functional", "symm_mem")):
            raise NotImplementedError(f"{func}: functional collectives are not counted")
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        operator = func._schema.name.partition("::")[2]
        if operator in _SILENT:
            return
        if operator not in _KINDS:
            raise NotImplementedError(f"{func}: what it sends is not known")
        kind = _KINDS[operator]
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = dist.ProcessGroup.unbox(named["process_group"])
        buffers = [named[name] for name in _PAYLOADS.get(kind, ("tensors",)) if name in named]
        payload = sum(_bytes(tensor) for tensor in tree_leaves(buffers))
        wire = wire_bytes(kind, payload, group.size(), _TO_OTHERS.get(kind, _all)(named, payload, group))
        key = self._name(group), kind
        self._traffic[key] = self._traffic.get(key, Traffic()) + Traffic(1, payload, wire)

    def _name(self, group: dist.ProcessGroup) -> str:
        known = self._names.get(group.group_name)
        return known or "ranks " + ",".join(map(str, dist.get_process_group_ranks(group)))


def group_names(groups: ProcessGroupCollection) -> dict[str, str]:
    """The layout's names of its process groups, by torch's ``group_name``; the default group is "world".

    A group that goes by several names in the collection gets the first in the order of its fields.
    """
    names: dict[str, str] = {}
    for field in dataclasses.fields(groups):
        group = getattr(groups, field.name, None)
        for part in group if isinstance(group, list) else [group]:
            if isinstance(part, dist.ProcessGroup):
                names.setdefault(part.group_name, field.name)
    assert dist.group.WORLD is not None
    return {dist.group.WORLD.group_name: "world"} | names


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _all(named: dict[str, Any], payload: int, group: dist.ProcessGroup) -> int:
    return payload


def _of_all_to_all(named: dict[str, Any], payload: int, group: dist.ProcessGroup) -> int:
    """Without what the rank sends to itself."""
    if "input_tensors" in named:
        return payload - _bytes(named["input_tensors"][group.rank()])
    tensor, splits = named["input"], named["input_split_sizes"]
    rows = splits[group.rank()] if splits else tensor.shape[0] // group.size()
    return payload - rows * (tensor[:1].numel() * tensor.element_size())


def _of_gather(named: dict[str, Any], payload: int, group: dist.ProcessGroup) -> int:
    """The root sends nothing."""
    return 0 if group.rank() == named["root_rank"] else payload


def _of_scatter(named: dict[str, Any], payload: int, group: dist.ProcessGroup) -> int:
    """The root keeps its own part; others have no payload."""
    return payload * (group.size() - 1) // group.size()


_TO_OTHERS: dict[Kind, Callable[[dict[str, Any], int, dist.ProcessGroup], int]] = {
    Kind.ALL_TO_ALL: _of_all_to_all,
    Kind.GATHER: _of_gather,
    Kind.SCATTER: _of_scatter,
}
"""Of the payload, what is for other ranks; of kinds that are not named, all of it."""
