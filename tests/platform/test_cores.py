"""Affinity, SMT, quotas and load, read from made-up /proc and /sys."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest

from steptron.platform import cores
from steptron.platform.cores import Cores, Load, cpu_quota, measure_load, usable_cores


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _alone(cpus: Iterable[int], quota: float | None = None) -> Cores:
    """Cores with one hardware thread each."""
    return Cores(frozenset(cpus), tuple(frozenset({cpu}) for cpu in sorted(cpus)), quota)


V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "32 31 0:29 {root} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "33 31 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:41 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


# ------------------------------------------------------------------------------- cores and shares


def test_hardware_threads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology"
    pairs = {cpu: f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    files = {f"{topology.format(cpu)}/core_cpus_list": pair for cpu, pair in pairs.items() if cpu < 4}
    files |= {f"{topology.format(cpu)}/thread_siblings_list": pair for cpu, pair in pairs.items() if cpu >= 4}
    _write(tmp_path, files)
    for mask, physical in ((range(8), 4), (range(4), 4), ({0, 4}, 1), ({0, 4, 5}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, mask=mask: set(mask))
        found = usable_cores(tmp_path)
        assert found.cpus == frozenset(mask)
        assert (len(found.siblings), found.count, found.quota) == (physical, physical, None)


def test_without_topology_every_cpu_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_cores(tmp_path).siblings == (frozenset({3}), frozenset({5}))


def test_lists_of_the_kernel() -> None:
    assert list(cores._parse_list("0-2,8,10-11\n")) == [0, 1, 2, 8, 10, 11]


@pytest.mark.parametrize(("quota", "count"), [(None, 6), (8.0, 6), (4.0, 4), (2.7, 2), (0.5, 1)])
def test_whole_cpus_of_a_quota_count(quota: float | None, count: int) -> None:
    assert _alone(range(6), quota).count == count


def test_processes_share_the_cores_that_they_have_in_common() -> None:
    six = _alone(range(6))
    everything = six.cpus
    assert [six.share([everything] * size) for size in (1, 2, 3, 4)] == [6, 3, 2, Fraction(3, 2)]
    # Bound by the launcher: each has its own three, and they are not divided again.
    assert _alone(range(3)).share([frozenset(range(3)), frozenset(range(3, 6))]) == 3
    # One core of three in common.
    assert _alone(range(3)).share([frozenset(range(3)), frozenset(range(2, 5))]) == Fraction(5, 2)


def test_a_quota_is_divided_between_processes() -> None:
    assert _alone(range(64), 4.0).share([frozenset(range(64))] * 2) == 2
    assert _alone(range(64), 4.0).share_of_cpus([frozenset(range(64))] * 8) == Fraction(1, 2)


def test_processes_on_the_two_threads_of_a_core_share_it() -> None:
    core = frozenset({0, 1})
    bound = Cores(frozenset({0}), (core,))
    assert bound.share([frozenset({0}), frozenset({1})]) == Fraction(1, 2)
    assert bound.share_of_cpus([frozenset({0}), frozenset({1})]) == 1


# ---------------------------------------------------------------------------------------- quotas


def test_quota_of_a_container_of_version_2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
    }
    assert cpu_quota(_write(tmp_path, files)) == 4.0
    assert cpu_quota(_write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})) is None


@pytest.mark.parametrize(("inner", "outer", "quota"), [("max", "150000", 1.5), ("50000", "200000", 0.5)])
def test_the_lowest_quota_of_the_hierarchy_counts(tmp_path: Path, inner: str, outer: str, quota: float) -> None:
    files = {
        "proc/self/cgroup": "0::/user.slice/job/step\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        "sys/fs/cgroup/user.slice/job/step/cpu.max": f"{inner} 100000\n",
        "sys/fs/cgroup/user.slice/cpu.max": f"{outer} 100000\n",
        "sys/fs/cgroup/other/cpu.max": "1000 100000\n",
    }
    assert cpu_quota(_write(tmp_path, files)) == quota


@pytest.mark.parametrize(("mounted", "path"), [("/docker/abc", "/docker/abc"), ("/", "/../../init"), ("/x", "/y/z")])
def test_quota_of_version_1_beside_an_unused_version_2(tmp_path: Path, mounted: str, path: str) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        "proc/self/cgroup": f"5:cpuset:{path}\n3:cpu,cpuacct:{path}\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS.format(root=mounted),
        f"{folder}/cpu.cfs_quota_us": "250000\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }
    assert cpu_quota(_write(tmp_path, files)) == 2.5
    assert cpu_quota(_write(tmp_path, {f"{folder}/cpu.cfs_quota_us": "-1\n"})) is None


def test_quota_of_a_group_below_the_mounted_one(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/abc/run\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc").replace("/sys/fs/cgroup", r"/sys/fs/c\040g"),
        "sys/fs/c g/run/cpu.max": "100000 50000\n",
    }
    assert cpu_quota(_write(tmp_path, files)) == 2.0


def test_no_control_groups_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


# ------------------------------------------------------------------------------------------ load


def test_load_is_of_the_cpus_of_the_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(*rows: tuple[int, ...]) -> str:
        lines = [f"cpu{i} {' '.join(map(str, row))} 0 0" for i, row in enumerate(rows)]
        return "\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 5"]) + "\n"

    #        user nice system idle iowait irq softirq steal
    first = [(100, 0, 50, 1000, 0, 0, 0, 10), (0,) * 8, (0,) * 8]
    later = [(150, 10, 60, 1020, 0, 0, 0, 20), (0, 0, 0, 90, 10, 0, 0, 0), (100, 0, 0, 0, 0, 0, 0, 0)]
    _write(tmp_path, {"proc/stat": stat(*first), "proc/pressure/cpu": "some avg10=12.50 avg60=0.26 total=4\nfull x\n"})
    monkeypatch.setattr(cores.time, "sleep", lambda _: _write(tmp_path, {"proc/stat": stat(*later)}))
    # CPU 0 is busy for 70 of 100 ticks and stolen for 10; CPU 1 is idle; CPU 2 is outside the mask.
    assert measure_load(frozenset({0, 1}), 1.0, tmp_path) == Load(busy=0.7, steal=0.05, waiting=0.125)


def test_load_where_the_kernel_tells_nothing(tmp_path: Path) -> None:
    assert measure_load(frozenset({0}), 0.0, tmp_path) == Load(busy=0.0, steal=0.0, waiting=None)


def test_this_machine() -> None:
    found = usable_cores()
    assert found.cpus == os.sched_getaffinity(0)
    assert 1 <= found.count <= len(found.siblings) <= len(found.cpus)
    load = measure_load(found.cpus, 0.1)
    assert 0 <= load.busy <= len(found.cpus) and 0 <= load.steal <= 1
