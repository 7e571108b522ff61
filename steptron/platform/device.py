"""The device of this process."""

from __future__ import annotations

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
