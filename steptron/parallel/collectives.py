"""torch's collectives on single tensors, by the names that the installed version has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# Names from torch 2.13 on, and before.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
