"""The device of this process, and its share of the CPU's cores."""

from __future__ import annotations

import os
from typing import Literal

import torch

from steptron.errors import UserError


def select_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Turns ``train.device`` into a device without an index.

    Args:
        name: "auto" takes CUDA where torch can use it, and the CPU elsewhere.

    Raises:
        UserError: "cuda" was asked for and torch cannot use it.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch"
        else:
            reason = f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable GPU: see nvidia-smi"
        raise UserError(f"device is 'cuda', but {reason}, or set device to 'cpu' or 'auto'")
    return torch.device("cuda")


def backend(device: torch.device) -> str:
    """Name of the communication backend of a device: "nccl" for CUDA, "gloo" for the CPU."""
    return "nccl" if device.type == "cuda" else "gloo"


def available_cores() -> int:
    """Cores that this process may run on (its affinity, which containers and schedulers set)."""
    return len(os.sched_getaffinity(0))


def set_threads(threads: int | None, local_world_size: int) -> int:
    """Sets the threads of one CPU operation in this process.

    Args:
        threads: number of threads; None shares the cores evenly between the processes of this machine.
        local_world_size: processes on this machine.

    Returns:
        The number set, at least 1.
    """
    count = threads if threads is not None else max(1, available_cores() // local_world_size)
    torch.set_num_threads(count)
    return count
