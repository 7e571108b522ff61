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
from steptron.errors import UserError
from steptron.platform import malloc
from steptron.platform import self_test as self_test_module
from steptron.platform.cores import Cores, measure_load, usable_cores
from steptron.platform.launch import Workers
from steptron.platform.threads import decide, misfit
from steptron_kernels import extension

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
_LOAD_SECONDS = 1.0  # how long other programs are watched
_OCCUPIED = 0.25  # CPUs of work by others above which timings suffer
_STOLEN = 0.05  # share of time taken by a virtual machine's host above which they suffer
_WAITING = 0.2  # share of time with a task waiting for a CPU above which they suffer


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


def collect(nproc: int = 1) -> Report:
    """Looks at versions, CPUs, the machine, devices, fast paths and optional packages. Starts no process.

    Args:
        nproc: local processes whose threads are to fit the machine.
    """
    versions = tuple(_versions())
    if _version("torch") is None:
        return Report(versions)
    return Report((*versions, *_cpus(nproc), *_machine(), *_fast_paths(), *_optional_packages()))


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


def instruction_sets() -> list[str]:
    """This processor's instruction sets, of those that speed up training."""
    flags = extension.cpu_flags()
    return [name for name, flag in _CPU_FLAGS.items() if flag in flags]


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


def _cpus(nproc: int) -> Iterator[Check]:
    section = "CPUs"
    cores = usable_cores()
    yield _usable(section, cores)
    for processes in sorted({1, nproc}):
        yield _threads(section, cores, processes)
    yield from _occupation(section, cores)


def _usable(section: str, cores: Cores) -> Check:
    name, total = "usable", os.cpu_count() or len(cores.cpus)
    limits = []
    if len(cores.cpus) < total:
        limits.append(f"affinity {len(cores.cpus)} of {total}")
    if len(cores.siblings) < len(cores.cpus):
        limits.append(
            f"{len(cores.cpus)} hardware threads on {len(cores.siblings)} cores, whose multipliers they share"
        )
    if cores.quota is not None:
        limits.append(f"CPU quota {cores.quota:g}")
    note = "; ".join(limits) or "no quota; the affinity mask has all"
    if cores.quota is not None and cores.quota < 1:
        return Check(section, name, "warning", f"{cores.quota:g} of a core", f"{note}: every step is held up; raise it")
    return Check(section, name, "ok", "1 core" if cores.count == 1 else f"{cores.count} cores", note)


def _threads(section: str, cores: Cores, nproc: int) -> Check:
    name = "threads of one process" if nproc == 1 else f"threads of {nproc} processes"
    variable = os.environ.get("OMP_NUM_THREADS", "unset")
    try:
        chosen = decide(None, cores, [cores.cpus] * nproc)
    except UserError as error:
        return Check(section, name, "failed", f"OMP_NUM_THREADS {variable}", str(error))
    value = f"{chosen.count}" if nproc == 1 else f"{chosen.count} each"
    value += f" (OMP_NUM_THREADS {variable})"
    if (problem := misfit(chosen)) is not None:
        status: Status = "warning" if chosen.count > 1 or nproc == 1 else "ok"
        return Check(section, name, status, value, problem)
    if os.environ.get("OMP_PROC_BIND", "false").lower() != "false" and nproc > 1:
        advice = "OMP_PROC_BIND binds the threads of every process to the same cores: unset it"
        return Check(section, name, "warning", value, advice)
    best = math.floor(chosen.share)
    idle = f"; {best} would use every core" if chosen.count < best else ""
    return Check(section, name, "ok", value, f"train.threads sets another number{idle}")


def _occupation(section: str, cores: Cores) -> Iterator[Check]:
    """What other programs do on the same CPUs while this one waits."""
    load = measure_load(cores.cpus, _LOAD_SECONDS)
    averages = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    total = len(cores.cpus)
    name, value = "other programs", f"{load.busy:.1f} of {total} CPUs busy (load average {averages})"
    if load.busy > _OCCUPIED:
        advice = "oversubscribed: steps are slower and their times vary; stop them, or lower train.threads"
        yield Check(section, name, "warning", value, advice)
    else:
        yield Check(section, name, "ok", value)
    if load.waiting is not None:
        name, value = "waiting for a CPU", f"{load.waiting:.0%} of the last 10 s"
        if load.waiting > _WAITING:
            advice = "more tasks than CPUs: each of them is slower"
            yield Check(section, name, "warning", value, advice)
        else:
            yield Check(section, name, "ok", value)
    if load.steal > _STOLEN:
        advice = "the host of this virtual machine runs others on its CPUs, or throttles it"
        yield Check(section, "taken by the host", "warning", f"{load.steal:.0%} of the time", advice)


def _machine() -> Iterator[Check]:
    import torch

    section = "machine"
    system, architecture = platform.system(), platform.machine()
    if (system, architecture) == ("Linux", "x86_64"):
        yield Check(section, "system", "ok", f"{platform.platform()}")
    else:
        yield Check(section, "system", "warning", f"{system} {architecture}", "tested on Linux x86_64 only")
    total, free = (memory_gib(name) for name in ("MemTotal", "MemAvailable"))
    yield Check(section, "memory", "ok", f"{free:.1f} of {total:.1f} GiB free")
    kept = malloc.obstacle()
    yield Check(
        section,
        "allocator",
        "ok" if kept is None else "off",
        malloc.glibc_version() or "unknown C library",
        "training on CPUs keeps freed memory" if kept is None else f"freed memory goes back to the system: {kept}",
    )
    flags, found = extension.cpu_flags(), instruction_sets()
    level = torch.backends.cpu.get_cpu_capability()
    if "avx2" in flags or not flags:
        yield Check(section, "CPU", "ok", ", ".join(found) or "unknown", f"torch uses {level}")
    else:
        yield Check(section, "CPU", "warning", "no AVX2", "torch will be slow")
    if extension.has_fast_bf16():
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
    yield _native_kernels(section, cuda)
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


def _native_kernels(section: str, cuda: bool) -> Check:
    name = "native CPU kernels"
    reason = extension.why_unavailable()
    if reason is not None:
        return Check(section, name, "off" if cuda else "warning", "plain torch operations instead, slower", reason)
    if extension.has_fast_bf16():
        return Check(section, name, "ok", "fp32 and bf16 products", "train.products=auto takes bf16 here")
    return Check(section, name, "ok", "fp32 products", "bf16 products need AVX512-BF16 or AMX")


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


def memory_gib(name: str) -> float:
    """A line of /proc/meminfo (which is in KiB), such as MemAvailable; NaN where there is none."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 2**20
    return math.nan
