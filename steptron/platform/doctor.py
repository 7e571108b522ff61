"""What this machine offers, what is missing, and whether processes can talk to each other."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from steptron import __version__
from steptron.platform import self_test as self_test_module
from steptron.platform.launch import Workers

Status = Literal["ok", "off", "warning", "failed"]
"""ok; off: an optional thing that is not there; warning: works, but not as it should; failed: must be mended."""

_SELF_TEST_MODULE = "steptron.platform.self_test"
_CPU_FLAGS = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 BF16": "avx512_bf16", "AMX BF16": "amx_bf16"}
_OPTIONAL_PACKAGES = {
    "tensorboard": "TensorBoard logs",
    "wandb": "Weights & Biases logs",
    "pyarrow": "Parquet corpora",
    "zstandard": "zstd-compressed corpora",
    "safetensors": "Hugging Face checkpoints",
    "matplotlib": "loss plots",
}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        section: heading it belongs to.
        name: what was looked at.
        status: outcome.
        value: what was found.
        advice: what to do, or why it is off; empty when there is nothing to say.
    """

    section: str
    name: str
    status: Status
    value: str
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """All lines, in order."""

    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        """Whether something that Steptron needs is missing or broken."""
        return any(check.status == "failed" for check in self.checks)


def collect() -> Report:
    """Looks at versions, the machine, devices, fast paths and optional packages. Starts no process."""
    versions = tuple(_versions())
    if _version("torch") is None:
        return Report(versions)
    return Report((*versions, *_machine(), *_fast_paths(), *_optional_packages()))


def self_test(nproc: int = 2, timeout: float = 120.0) -> Report:
    """Runs ``steptron.platform.self_test`` in local processes.

    Args:
        nproc: number of processes.
        timeout: seconds after which they are killed.
    """
    section = f"{nproc} processes"
    with tempfile.TemporaryDirectory(prefix="steptron-doctor-") as folder:
        workers = Workers(nproc, [folder], module=_SELF_TEST_MODULE, capture=True)
        deadline = time.monotonic() + timeout
        try:
            first_failed = None
            while workers.running and time.monotonic() < deadline:
                for rank in workers.poll():
                    if workers.exit_codes[rank] and first_failed is None:
                        first_failed = rank
                        deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.05)
            late = workers.running
        finally:
            workers.kill()
        files = {rank: Path(folder) / f"rank{rank}.json" for rank in range(nproc)}
        passed = {rank: json.loads(file.read_text()) if file.exists() else {} for rank, file in files.items()}
        tails = {rank: workers.tail(rank) for rank in range(nproc)}
        workers.remove_logs()
    checks = []
    for step in self_test_module.STEPS:
        without = [rank for rank in range(nproc) if step not in passed[rank]]
        if not without:
            checks.append(Check(section, step, "ok", f"{max(passed[rank][step] for rank in range(nproc)):.2f} s"))
            continue
        rank = first_failed if first_failed in without else without[0]
        if rank in late and first_failed is None:
            value = f"rank(s) {', '.join(map(str, without))} did not finish within {timeout:g} s"
        else:
            value = f"rank {rank} ended with exit code {workers.exit_codes[rank]}"
        advice = "\n".join(tails[rank].splitlines()[-5:]) or "no output; a firewall may block the loopback interface"
        checks.append(Check(section, step, "failed", value, advice))
        break
    return Report(tuple(checks))


# ------------------------------------------------------------------------------------- sections


def _versions() -> Iterator[Check]:
    section = "versions"
    requirements = _requirements()
    python = platform.python_version()
    try:
        supported = SpecifierSet(metadata.metadata("steptron")["Requires-Python"] or "")
        yield Check(section, "steptron", "ok", __version__)
    except metadata.PackageNotFoundError:
        supported = SpecifierSet()
        advice = "supported versions are unknown: pip install -e ."
        yield Check(section, "steptron", "warning", f"{__version__} (not installed)", advice)
    if python in supported:
        yield Check(
            section, "Python", "ok", f"{python} ({sys.executable})", f"supported: {supported}" if supported else ""
        )
    else:
        yield Check(section, "Python", "failed", python, f"supported: {supported}; use another Python")
    for name in ("torch", "megatron-core", "psutil"):
        supported = requirements.get(name, SpecifierSet())
        version = _version(name)
        if version is None:
            yield Check(section, name, "failed", "not installed", f"pip install '{name}{supported}'")
        elif supported.contains(version, prereleases=True):
            yield Check(section, name, "ok", version, f"supported: {supported}" if supported else "")
        else:
            yield Check(section, name, "failed", version, f"supported: {supported}; pip install '{name}{supported}'")


def _machine() -> Iterator[Check]:
    import torch

    from steptron.platform.device import available_cores

    section = "machine"
    system, architecture = platform.system(), platform.machine()
    if (system, architecture) == ("Linux", "x86_64"):
        yield Check(section, "system", "ok", f"{platform.platform()}")
    else:
        yield Check(section, "system", "warning", f"{system} {architecture}", "tested on Linux x86_64 only")
    cores = available_cores()
    yield Check(section, "cores", "ok", f"{cores} of {os.cpu_count()} usable by this process")
    quota = _cpu_quota()
    if quota is not None and quota < cores:
        advice = f"the container's limit is below its {cores} cores: set train.threads"
        yield Check(section, "CPU quota", "warning", f"{quota:g} cores", advice)
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    value = f"{torch.get_num_threads()} per process by default (OMP_NUM_THREADS {threads})"
    if torch.get_num_threads() > cores:
        yield Check(section, "threads", "warning", value, f"more threads than the {cores} usable cores: unset it")
    else:
        yield Check(section, "threads", "ok", value, "training shares the cores between its processes (train.threads)")
    load = os.getloadavg()[0]
    if load > cores:
        yield Check(section, "load", "warning", f"{load:.1f}", f"other programs keep the {cores} cores busy")
    total, free = (_memory_gib(name) for name in ("MemTotal", "MemAvailable"))
    yield Check(section, "memory", "ok", f"{free:.1f} of {total:.1f} GiB free")
    flags = _cpu_flags()
    found = [name for name, flag in _CPU_FLAGS.items() if flag in flags]
    level = torch.backends.cpu.get_cpu_capability()
    if "avx2" in flags or not flags:
        yield Check(section, "CPU", "ok", ", ".join(found) or "unknown", f"torch uses {level}")
    else:
        yield Check(section, "CPU", "warning", "no AVX2", "torch will be slow")
    if "amx_bf16" in flags or "avx512_bf16" in flags:
        yield Check(section, "bfloat16 on CPU", "ok", "in hardware")
    else:
        yield Check(section, "bfloat16 on CPU", "off", "emulated", "train in fp32 on this CPU: bf16 is slower")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            size = f"{properties.total_memory / 2**30:.0f} GiB"
            value = f"{properties.name}, {size}, compute {properties.major}.{properties.minor}"
            yield Check(section, f"cuda:{index}", "ok", value)
    else:
        yield Check(section, "CUDA", "off", "no usable GPU", f"torch {torch.__version__}; runs on the CPU with gloo")


def _fast_paths() -> Iterator[Check]:
    import torch

    section = "fast paths"
    cuda = torch.cuda.is_available()
    yield _grouped_mm(section)
    yield _compiler(section, cuda)
    for name, module, wanted in (
        ("Triton", "triton", "pip install triton"),
        ("Transformer Engine", "transformer_engine", "pip install 'steptron[gpu]'"),
        ("flash-attn", "flash_attn", "pip install flash-attn"),
        ("Apex", "amp_C", "build NVIDIA's Apex from source (PyPI's `apex` is another project)"),
    ):
        installed = importlib.util.find_spec(module) is not None
        if not cuda:
            yield Check(section, name, "off", "installed" if installed else "not installed", "needs a CUDA GPU")
        elif installed:
            yield Check(section, name, "ok", "installed")
        else:
            yield Check(section, name, "off", "not installed", wanted)


def _grouped_mm(section: str) -> Check:
    import torch

    name = "grouped GEMM"
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return Check(section, name, "failed", f"torch {torch.__version__} has no grouped_mm", "install torch >= 2.10")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    b = torch.ones(2, 8, 8, dtype=torch.bfloat16, device=device)
    offsets = torch.tensor([3, 8], dtype=torch.int32, device=device)
    try:
        right = bool((torch.nn.functional.grouped_mm(a, b, offs=offsets) == 8).all())
    except RuntimeError as error:
        return Check(section, name, "failed", f"torch.nn.functional.grouped_mm on {device} raises", str(error))
    value = f"torch.nn.functional.grouped_mm on {device}"
    return Check(section, name, "ok", value) if right else Check(section, name, "failed", value, "wrong result")


def _compiler(section: str, cuda: bool) -> Check:
    name = "torch.compile"
    compiler = next((path for path in (os.environ.get("CXX"), "g++", "clang++") if path and shutil.which(path)), None)
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if cuda and importlib.util.find_spec("triton") is not None:
        return Check(section, name, "ok", "Triton")
    if compiler is None:
        return Check(section, name, "off", "no C++ compiler", "install g++ (Debian, Ubuntu: apt install g++)")
    if not headers.exists():
        advice = f"{headers} is missing (Debian, Ubuntu: apt install python3-dev)"
        return Check(section, name, "off", "no Python headers", advice)
    return Check(section, name, "ok", f"{shutil.which(compiler)}")


def _optional_packages() -> Iterator[Check]:
    for name, purpose in _OPTIONAL_PACKAGES.items():
        version = _version(name)
        if version is None:
            yield Check("optional packages", name, "off", "not installed", f"for {purpose}: pip install {name}")
        else:
            yield Check("optional packages", name, "ok", version, purpose)


# -------------------------------------------------------------------------------------- helpers


def _requirements() -> dict[str, SpecifierSet]:
    """Version ranges that the installed package declares."""
    try:
        lines = metadata.requires("steptron") or []
    except metadata.PackageNotFoundError:
        return {}
    return {parsed.name: parsed.specifier for parsed in map(Requirement, lines) if parsed.marker is None}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _memory_gib(name: str) -> float:
    """A line of /proc/meminfo, which is in KiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 2**20
    return math.nan


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _cpu_quota() -> float | None:
    """Cores that the control group grants (cgroup v2), which the affinity does not show."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
