"""Deterministic operations."""

from __future__ import annotations

import os

import torch


def use_deterministic_algorithms(on: bool) -> None:
    """Makes torch use only deterministic operations, or lifts the restriction.

    With it on, an operation that has no deterministic version raises RuntimeError. Call before the
    first CUDA operation: cuBLAS reads its workspace setting once.
    """
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if on != torch.are_deterministic_algorithms_enabled():  # the call loads TorchInductor's configuration
        torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.benchmark = False
