"""The examination of the machine."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from steptron.cli.doctor import doctor as command
from steptron.platform import doctor
from steptron.platform.cores import Cores, Load
from steptron.platform.doctor import Check, Report


def _cores(count: int) -> tuple[frozenset[int], ...]:
    """Cores of one hardware thread."""
    return tuple(frozenset({cpu}) for cpu in range(count))


def _by_name(report: Report) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


def _run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_report_shows_versions_machine_and_fast_paths() -> None:
    report = doctor.collect()
    checks = _by_name(report)
    assert not report.failed, [check for check in report.checks if check.status == "failed"]
    assert checks["torch"].value == metadata.version("torch")
    assert checks["megatron-core"].value == metadata.version("megatron-core")
    assert checks["grouped GEMM"].status == "ok"
    assert "CUDA" in checks or "cuda:0" in checks
    if not torch.cuda.is_available():
        assert all(checks[name].advice == "needs a CUDA GPU" for name in ("Triton", "Transformer Engine", "flash-attn"))


def test_versions_outside_the_declared_ranges_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.9.1", "megatron-core": "0.16.1", "psutil": None}
    declared = ["torch>=2.10,<2.15", "megatron-core>=0.16.1,<0.20", "psutil>=6.0", 'pytest; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda _: declared)
    monkeypatch.setattr(metadata, "metadata", lambda _: {"Requires-Python": ">=3.50"})
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, "1.0"))
    checks = _by_name(doctor.collect())
    assert checks["torch"].status == "failed" and "<2.15,>=2.10" in checks["torch"].advice
    assert checks["megatron-core"].status == "ok"
    assert checks["psutil"].status == "failed" and "pip install" in checks["psutil"].advice
    assert checks["Python"].status == "failed" and ">=3.50" in checks["Python"].advice


IDLE = Load(busy=0.0, steal=0.0, waiting=0.0)


def _machine(monkeypatch: pytest.MonkeyPatch, cores: Cores, load: Load = IDLE) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: cores)
    monkeypatch.setattr(doctor, "measure_load", lambda cpus, seconds: load)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)


def test_usable_cores_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    sixteen = tuple(frozenset({core, core + 32}) for core in range(16))
    _machine(monkeypatch, Cores(frozenset().union(*sixteen), sixteen, 4.0))
    checks = _by_name(doctor.collect(nproc=2))
    assert checks["usable"] == Check(
        "CPUs",
        "usable",
        "ok",
        "4 cores",
        "affinity 32 of 64; 32 hardware threads on 16 cores, whose multipliers they share; CPU quota 4",
    )
    assert checks["threads of one process"].value == "4 (OMP_NUM_THREADS unset)"
    assert checks["threads of 2 processes"].value == "2 each (OMP_NUM_THREADS unset)"
    monkeypatch.setattr(doctor, "usable_cores", lambda: Cores(frozenset(range(64)), _cores(64)))
    assert _by_name(doctor.collect())["usable"].value == "64 cores"
    monkeypatch.setattr(doctor, "usable_cores", lambda: Cores(frozenset(range(64)), _cores(64), 0.5))
    assert (checks := _by_name(doctor.collect()))["usable"].status == "warning"
    assert checks["usable"].value == "0.5 of a core" and "raise it" in checks["usable"].advice


def test_threads_of_the_environment_against_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, Cores(frozenset(range(4)), _cores(4)))

    def status(nproc: int, **variables: str) -> tuple[str, str]:
        with monkeypatch.context() as context:
            for name, value in variables.items():
                context.setenv(name, value)
            check = _by_name(doctor.collect(nproc))[
                "threads of one process" if nproc == 1 else f"threads of {nproc} processes"
            ]
        return check.status, check.advice

    assert status(1, OMP_NUM_THREADS="4")[0] == "ok"
    found, advice = status(2, OMP_NUM_THREADS="4")
    assert (
        found == "warning" and "2 processes of 4 threads on 4 usable CPUs" in advice and "OMP_NUM_THREADS=2" in advice
    )
    assert status(8) == ("ok", "8 processes on 4 usable CPUs: less than one CPU each")
    assert status(1, OMP_NUM_THREADS="2") == ("ok", "train.threads sets another number; 4 would use every core")
    assert status(1, OMP_NUM_THREADS="many")[0] == "failed"
    assert status(2, OMP_PROC_BIND="true")[0] == "warning"
    assert status(1, OMP_PROC_BIND="true")[0] == "ok"


@pytest.mark.parametrize(
    ("load", "warned"),
    [
        (Load(busy=0.1, steal=0.0, waiting=0.1), set()),
        (Load(busy=0.1, steal=0.0, waiting=None), set()),
        (Load(busy=1.5, steal=0.01, waiting=0.1), {"other programs"}),
        (Load(busy=4.0, steal=0.0, waiting=0.6), {"other programs", "waiting for a CPU"}),
        (Load(busy=0.0, steal=0.12, waiting=0.0), {"taken by the host"}),
    ],
)
def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch, load: Load, warned: set[str]) -> None:
    _machine(monkeypatch, Cores(frozenset(range(4)), _cores(4)), load)
    checks = [check for check in doctor.collect().checks if check.section == "CPUs"]
    assert {check.name for check in checks if check.status == "warning"} == warned


def test_allocator_that_is_left_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, Cores(frozenset({0}), _cores(1)))
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so.4")
    check = _by_name(doctor.collect())["allocator"]
    assert check.status == "off" and "LD_PRELOAD=libtcmalloc.so.4" in check.advice


def test_slow_cpu_and_missing_compiler_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.extension, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    checks = _by_name(doctor.collect())
    assert checks["bfloat16 on CPU"].status == "off"
    if not torch.cuda.is_available():
        assert checks["torch.compile"].status == "off" and "g++" in checks["torch.compile"].advice


def test_self_test_passes_in_two_processes() -> None:
    report = doctor.self_test()
    assert [(check.name, check.status) for check in report.checks] == [
        ("rendezvous", "ok"),
        ("all-reduce", "ok"),
        ("uneven all-to-all", "ok"),
        ("pipeline exchange", "ok"),
    ]


def test_self_test_that_fails_shows_the_rank_and_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SELF_TEST_MODULE", "steptron.platform.no_such_module")
    (check,) = doctor.self_test().checks
    assert (check.name, check.status) == ("rendezvous", "failed")
    assert "ended with exit code 1" in check.value
    assert "no_such_module" in check.advice


def test_self_test_that_hangs_names_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SELF_TEST_MODULE", "http.server")
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", _FolderNamedZero)
    (check,) = doctor.self_test(timeout=1.5).checks
    assert check.status == "failed"
    assert check.value == "rank(s) 0, 1 did not finish within 1.5 s"


class _FolderNamedZero:
    """Makes ``python -m http.server 0`` of the self-test's command: a server that never ends."""

    def __init__(self, prefix: str) -> None:
        pass

    def __enter__(self) -> str:
        return "0"

    def __exit__(self, *_: object) -> None:
        pass


def test_command_prints_tables_and_its_exit_code_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "collect", lambda nproc: Report((Check("versions", "torch", "ok", "2.13.0"),)))
    monkeypatch.setattr(
        doctor, "self_test", lambda nproc, timeout: Report((Check("2 processes", "step", "ok", "1 s"),))
    )
    good = _run()
    assert good.exit_code == 0
    assert "\x1b" not in good.output
    assert "Everything that Steptron needs works." in good.output

    broken = Report((Check("versions", "torch", "failed", "not installed", "pip install torch"),))
    monkeypatch.setattr(doctor, "collect", lambda nproc: broken)
    bad = _run()
    assert bad.exit_code == 1
    assert "To mend: versions, torch: not installed. pip install torch" in bad.output
