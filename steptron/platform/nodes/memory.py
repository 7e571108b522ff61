"""Free memory where each process runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from steptron.platform.doctor import Check, memory_gib
from steptron.platform.nodes.peers import Peer, name_ranks

SECTION = "memory"

_USED = 0.1  # share of a GPU's memory in use before the run above which somebody else is on it
_LITTLE = 0.5  # share of the median below which a host has little free memory


def own_memory(device: torch.device, local_size: int) -> dict[str, float]:
    """Free and total memory, GiB: ``host`` and ``host_total`` per process of this node, ``gpu`` and ``gpu_total``.

    Args:
        device: of this process.
        local_size: processes on this node, which share its memory.
    """
    found = {"host": memory_gib("MemAvailable") / local_size, "host_total": memory_gib("MemTotal") / local_size}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        # What this process's own context and communication buffers hold counts as used; they stay in training too.
        found |= {"gpu": free / 2**30, "gpu_total": total / 2**30}
    return found


def judge(memory: Sequence[dict[str, float]], peers: Sequence[Peer]) -> list[Check]:
    """The lines of the report.

    Args:
        memory: what ``own_memory`` returned on each process.
        peers: all processes.
    """
    free = [own["host"] for own in memory]
    usual = median(free)
    little = [rank for rank, own in enumerate(free) if own < _LITTLE * usual]
    found = f"{_range(free)} GiB free per process"
    if little:
        advice = f"less than half of the median on {name_ranks(little, peers)}: what else runs there?"
        checks = [Check(SECTION, "host", "warning", found, advice)]
    else:
        checks = [Check(SECTION, "host", "ok", found)]
    if all("gpu" in own for own in memory):
        taken = [rank for rank, own in enumerate(memory) if 1 - own["gpu"] / own["gpu_total"] > _USED]
        found = f"{_range([own['gpu'] for own in memory])} GiB free"
        if taken:
            advice = f"more than {_USED:.0%} in use before the run on {name_ranks(taken, peers)}: see nvidia-smi there"
            checks.append(Check(SECTION, "GPU", "warning", found, advice))
        else:
            checks.append(Check(SECTION, "GPU", "ok", found))
    return checks


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"
