"""Memory that a piece of code leaves allocated, counted by tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveMemory(TorchDispatchMode):
    """Sees every tensor that operations return within it; ``bytes()`` counts those still in memory, each once.

    Args:
        besides: tensors that are not counted, nor their views.
    """

    def __init__(self, *besides: Tensor) -> None:
        super().__init__()
        self._besides = {memory_of(tensor).cdata for tensor in besides}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, result)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._besides:
            self._storages[reference.cdata] = (reference, storage.nbytes())

    def bytes(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())

    def settled_bytes(self, seconds: float = 0.1) -> int:
        """The same, once it has not changed for a while: gloo's threads let go of tensors after a collective."""
        deadline, size = time.monotonic() + seconds, self.bytes()
        while time.monotonic() < deadline:
            time.sleep(seconds / 20)
            if (now := self.bytes()) != size:
                deadline, size = time.monotonic() + seconds, now
        return size


def is_alive(storage: StorageWeakRef) -> bool:
    """Whether anything still refers to a tensor's memory."""
    return not storage.expired()


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """Refers to a tensor's memory without keeping it."""
    return StorageWeakRef(tensor.untyped_storage())
