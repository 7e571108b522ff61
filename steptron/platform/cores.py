"""The CPU cores that this process may use, and how busy they are.

Standard library only. What counts is what the kernel lets the process have: its affinity mask, and
the CPU quota of its control groups, which a container sets and the mask does not show.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class Cores:
    """What this process may compute on.

    Attributes:
        cpus: numbers of the logical CPUs in its affinity mask.
        siblings: for each physical core with a CPU in the mask, all logical CPUs of that core.
        quota: CPUs that the control groups grant together, to this process and others in them; None without a limit.
    """

    cpus: frozenset[int]
    siblings: tuple[frozenset[int], ...]
    quota: float | None = None

    @property
    def count(self) -> int:
        """Threads of matrix products that these cores can run at full speed, at least 1.

        Hardware threads of one core share its multipliers, so cores count; of a quota, whole CPUs
        count, because a thread beyond them has all threads stopped for part of each period.
        """
        return max(1, math.floor(self.share([self.cpus])))

    def share(self, masks: Sequence[frozenset[int]]) -> Fraction:
        """Physical cores per process where several processes run on this machine.

        Args:
            masks: affinity masks of all of them, this one included. Processes that a launcher has bound
                to different cores do not share those; processes with the same mask share all.
        """
        return self._limited(self.siblings, masks)

    def share_of_cpus(self, masks: Sequence[frozenset[int]]) -> Fraction:
        """As ``share``, in logical CPUs."""
        return self._limited([frozenset({cpu}) for cpu in self.cpus], masks)

    def _limited(self, units: Sequence[frozenset[int]], masks: Sequence[frozenset[int]]) -> Fraction:
        share = sum((Fraction(1, max(1, sum(bool(unit & mask) for mask in masks))) for unit in units), Fraction(0))
        return share if self.quota is None else min(share, Fraction(self.quota) / len(masks))


@dataclass(frozen=True)
class Load:
    """What the CPUs of a mask did during an interval.

    Attributes:
        busy: CPUs' worth of work of all processes of the machine on these CPUs.
        steal: share of the time in which the host of this virtual machine ran something else, 0 to 1.
        waiting: share of the last ten seconds in which some task waited for a CPU, 0 to 1; None where the
            kernel does not tell.
    """

    busy: float
    steal: float
    waiting: float | None


def usable_cores(root: Path = _ROOT) -> Cores:
    """Reads affinity, topology and quota of this process.

    Args:
        root: folder with ``proc`` and ``sys``.
    """
    cpus = frozenset(os.sched_getaffinity(0))
    siblings = tuple(dict.fromkeys(_siblings(root, cpu) for cpu in sorted(cpus)))
    return Cores(cpus, siblings, cpu_quota(root))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs that the control groups of this process grant (cgroup v1 or v2); None without a limit.

    A limit further up the hierarchy holds too, so the lowest of all levels counts.
    """
    quotas = [quota for folder in _cpu_cgroups(root) if (quota := _folder_quota(folder)) is not None]
    return min(quotas, default=None)


def measure_load(cpus: frozenset[int], seconds: float, root: Path = _ROOT) -> Load:
    """Watches the CPUs for ``seconds``, during which this process sleeps."""
    before = _cpu_ticks(root, cpus)
    time.sleep(seconds)
    after = _cpu_ticks(root, cpus)
    # /proc/stat: user nice system idle iowait irq softirq steal; what follows is contained in user and nice.
    passed = [now - then for then, now in zip(before, after, strict=True)]
    total = sum(passed)
    if total <= 0:
        return Load(busy=0.0, steal=0.0, waiting=_pressure(root))
    user, nice, system, _idle, _iowait, irq, softirq, steal = passed
    busy = (user + nice + system + irq + softirq) / total * len(cpus)
    return Load(busy=busy, steal=steal / total, waiting=_pressure(root))


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """Logical CPUs of a CPU's physical core; itself alone where the kernel does not tell."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        with contextlib.suppress(OSError, ValueError):
            return frozenset({cpu, *_parse_list((folder / name).read_text())})
    return frozenset({cpu})


def _parse_list(text: str) -> Iterator[int]:
    """Numbers of a kernel CPU list such as ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _cpu_cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups that may hold a CPU limit, up to the mount point."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    # Lines are hierarchy:controllers:path; version 2 has hierarchy 0 and no controllers.
    paths: dict[str, str] = {}
    for line in memberships:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        # Before the dash: id, parent, device, root of the mount, mount point; after it: type, source, options.
        left, _, right = line.partition(" - ")
        (_, _, _, mount_root, mount_point), (kind, _, options) = left.split()[:5], right.split()[:3]
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        top = root / _unescape(mount_point).lstrip("/")
        inside = _relative(paths[kind], _unescape(mount_root))
        for depth in range(len(inside), -1, -1):
            yield top.joinpath(*inside[:depth])


def _relative(path: str, mount_root: str) -> tuple[str, ...]:
    """Folders from the mount point to the group. A path that is not below the mounted one is the
    host's view of it: then the mount point is the group."""
    parts, top = Path(path).parts[1:], Path(mount_root).parts[1:]
    if ".." in parts or parts[: len(top)] != top:
        return ()
    return parts[len(top) :]


def _unescape(path: str) -> str:
    """mountinfo writes spaces and the like as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _folder_quota(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _cpu_ticks(root: Path, cpus: frozenset[int]) -> list[int]:
    """Sums over CPUs of the first eight columns of /proc/stat; zeros where it cannot be read."""
    sums = [0] * 8
    with contextlib.suppress(OSError):
        for line in (root / "proc/stat").read_text().splitlines():
            name, *values = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in cpus:
                sums = [total + int(value) for total, value in zip(sums, values[:8], strict=True)]
    return sums


def _pressure(root: Path) -> float | None:
    with contextlib.suppress(OSError):
        match = re.search(r"^some avg10=([\d.]+)", (root / "proc/pressure/cpu").read_text(), re.MULTILINE)
        return None if match is None else float(match[1]) / 100
    return None
