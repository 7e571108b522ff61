"""How many CPU threads a process takes, and what it says when that does not fit the machine.

The number is of threads inside one operation, for torch, its OpenMP loops, MKL and oneDNN alike.
torch's second pool, between operations, is never started by eager mode or the autograd engine; the
tokenizers' pool (``RAYON_NUM_THREADS``) works in `steptron data build` only. Both are left alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from steptron.errors import UserError
from steptron.platform.cores import Cores


@dataclass(frozen=True)
class Threads:
    """Threads of each operation in this process.

    Attributes:
        count: at least 1.
        source: what decided: "train.threads", "OMP_NUM_THREADS" or "cores".
        share: physical cores of this machine per local process.
        share_of_cpus: logical CPUs per local process.
        local_size: processes on this machine.
    """

    count: int
    source: str
    share: Fraction
    share_of_cpus: Fraction
    local_size: int


def default_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that libraries read when they are loaded, and that are to be set before; none that is set already."""
    wanted = {
        # numpy would start one thread per core in every process; the matrix products are torch's.
        "OPENBLAS_NUM_THREADS": "1",
    }
    if "OMP_WAIT_POLICY" not in environment:
        # Waiting OpenMP threads spin for so long by default that one busy neighbour slows a step tenfold; this
        # costs a few per cent on an idle machine.
        wanted["GOMP_SPINCOUNT"] = "1000"
    return {name: value for name, value in wanted.items() if name not in environment}


def decide(
    setting: int | None,
    cores: Cores,
    masks: Sequence[frozenset[int]],
    environment: Mapping[str, str] = os.environ,
) -> Threads:
    """Decides how many threads this process takes.

    ``train.threads`` wins, then ``OMP_NUM_THREADS``, whoever set it; otherwise the process takes its
    share of the physical cores, rounded down.

    Args:
        setting: ``train.threads``.
        cores: what this process may use.
        masks: affinity masks of all processes on this machine, this one included.
        environment: environment variables.

    Raises:
        UserError: ``OMP_NUM_THREADS`` is not a number of threads.
    """
    share = cores.share(masks)
    asked = _omp_num_threads(environment)
    if setting is not None:
        count, source = setting, "train.threads"
    elif asked is not None:
        count, source = asked, "OMP_NUM_THREADS"
    else:
        count, source = max(1, math.floor(share)), "cores"
    return Threads(count, source, share, cores.share_of_cpus(masks), len(masks))


def _omp_num_threads(environment: Mapping[str, str] = os.environ) -> int | None:
    """Threads that ``OMP_NUM_THREADS`` asks for at the outermost level; None where it is unset or empty.

    Raises:
        UserError: it is not a number of threads.
    """
    value = environment.get("OMP_NUM_THREADS", "").strip()
    if not value:
        return None
    outermost = value.split(",")[0].strip()  # a list is one number per level of nesting
    if not outermost.isdecimal() or int(outermost) < 1:
        raise UserError(f"the environment variable OMP_NUM_THREADS is {value!r}; it must be a number of at least 1")
    return int(outermost)


def set_threads(count: int) -> None:
    """Sets the threads of one operation in this process, for torch, OpenMP and MKL."""
    import torch

    torch.set_num_threads(count)


def misfit(threads: Threads, environment: Mapping[str, str] = os.environ) -> str | None:
    """One line on threads that do not fit the machine; None where they do."""
    best = max(1, math.floor(threads.share))
    processes = "1 process" if threads.local_size == 1 else f"{threads.local_size} processes"
    cpus = f"{round(float(threads.share_of_cpus * threads.local_size), 1):g} usable CPUs"
    if threads.count > 1 and threads.count > threads.share_of_cpus:
        return (
            f"{processes} of {threads.count} threads on {cpus}: threads wait for each other; "
            f"{threads.source}={best} suits this machine"
        )
    if threads.share_of_cpus < 1:
        return f"{processes} on {cpus}: less than one CPU each"
    if best > 1 and _set_by_torchrun(threads, environment):
        return (
            f"{processes} of 1 thread on {cpus}: torchrun sets OMP_NUM_THREADS=1 where it is unset; "
            f"OMP_NUM_THREADS={best} or train.threads={best} suits this machine"
        )
    return None


def _set_by_torchrun(threads: Threads, environment: Mapping[str, str]) -> bool:
    """Whether it looks like torchrun's own 1, which it sets where it starts more than one process."""
    if threads.source != "OMP_NUM_THREADS" or "TORCHELASTIC_RUN_ID" not in environment:
        return False
    return threads.count == 1 and threads.local_size > 1
