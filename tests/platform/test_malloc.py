"""Freed memory stays in the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from steptron.platform import malloc
from tests.worker_pool import REPOSITORY

# Takes, fills and frees blocks as a step does: more than one size, more at once than after.
_STEPS = """
import ctypes, os, resource, sys
from steptron.platform import malloc
if sys.argv[1] == "kept":
    assert malloc.keep_freed_memory({}) is None
    assert malloc.keep_freed_memory({}) is None
sizes = [(8 + 3 * i) << 20 for i in range(8)]
def step():
    blocks = [bytes(1) * size for size in sizes]
    big = bytes(1) * (100 << 20)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3)
"""


def _faults_per_step(mode: str) -> int:
    command = [sys.executable, "-c", _STEPS, mode]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_steps_stop_faulting_their_memory_in() -> None:
    if malloc.glibc_version() is None:
        assert malloc.keep_freed_memory({}) == "the C library is not glibc"
        return
    pages = sum((8 + 3 * i) << 20 for i in range(8)) // 4096
    assert _faults_per_step("default") > pages // 2
    assert _faults_per_step("kept") < 100


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "LD_PRELOAD=/usr/lib/libjemalloc.so.2 brings another allocator"),
        ({"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}, "MALLOC_TRIM_THRESHOLD_ is set, and kept"),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}, "GLIBC_TUNABLES is set, and kept"),
    ],
)
def test_what_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], reason: str) -> None:
    monkeypatch.setattr(malloc, "glibc_version", lambda: "glibc 2.36")
    monkeypatch.setattr(malloc.ctypes, "CDLL", _Library)
    monkeypatch.setattr(_Library, "calls", [])
    assert malloc.keep_freed_memory(environment) == malloc.obstacle(environment) == reason
    assert _Library.calls == []


def test_other_variables_of_glibc_do_not_matter() -> None:
    environment = {"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.rtld.optional_static_tls=5"}
    assert malloc.obstacle(environment) == malloc.obstacle({})


class _Library:
    """A C library that notes what it is asked, and refuses thresholds above a limit."""

    calls: list[tuple[int, int]] = []  # noqa: RUF012
    limit = 1 << 62

    def __init__(self, name: None) -> None:
        pass

    @staticmethod
    def mallopt(parameter: int, value: int) -> int:
        _Library.calls.append((parameter, value))
        return int(value <= _Library.limit or parameter == -1)


@pytest.mark.parametrize(
    ("limit", "calls", "reason"),
    [
        (1 << 62, [(-3, 1 << 30), (-1, 2**31 - 1)], None),
        (1 << 25, [(-3, 1 << 30), (-3, 1 << 25), (-1, 2**31 - 1)], None),
        (0, [(-3, 1 << 30), (-3, 1 << 25)], "glibc refuses to change its threshold"),
    ],
)
def test_an_older_glibc_gets_its_highest_threshold(
    monkeypatch: pytest.MonkeyPatch, limit: int, calls: list[tuple[int, int]], reason: str | None
) -> None:
    monkeypatch.setattr(malloc, "glibc_version", lambda: "glibc 2.28")
    monkeypatch.setattr(malloc.ctypes, "CDLL", _Library)
    monkeypatch.setattr(_Library, "limit", limit)
    monkeypatch.setattr(_Library, "calls", [])
    assert malloc.keep_freed_memory({}) == reason
    assert _Library.calls == calls


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError(f"unrecognized configuration name {name}")

    monkeypatch.setattr(malloc.os, "confstr", unknown)
    assert malloc.keep_freed_memory({}) == "the C library is not glibc"
    assert isinstance(ctypes.CDLL(None), ctypes.CDLL)
