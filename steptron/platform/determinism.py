"""Random seeds and deterministic operations."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch (CPU and CUDA) in this process.

    Initial values and the order of data do not depend on them: those are functions of their own seeds.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
