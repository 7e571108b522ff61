"""The examination of the machine."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from steptron.cli.doctor import doctor as command
from steptron.platform import doctor
from steptron.platform.doctor import Check, Report


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


def test_oversubscription_quota_and_missing_compiler_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 999)
    monkeypatch.setattr(doctor, "_cpu_quota", lambda: 0.5)
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    checks = _by_name(doctor.collect())
    assert checks["threads"].status == "warning" and "more threads than" in checks["threads"].advice
    assert checks["CPU quota"].status == "warning" and checks["CPU quota"].value == "0.5 cores"
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
    monkeypatch.setattr(doctor, "collect", lambda: Report((Check("versions", "torch", "ok", "2.13.0"),)))
    monkeypatch.setattr(
        doctor, "self_test", lambda nproc, timeout: Report((Check("2 processes", "step", "ok", "1 s"),))
    )
    good = _run()
    assert good.exit_code == 0
    assert "\x1b" not in good.output
    assert "Everything that Steptron needs works." in good.output

    broken = Report((Check("versions", "torch", "failed", "not installed", "pip install torch"),))
    monkeypatch.setattr(doctor, "collect", lambda: broken)
    bad = _run()
    assert bad.exit_code == 1
    assert "To mend: versions, torch: not installed. pip install torch" in bad.output
