"""What has to be the same on all processes: versions, builds, hardware, settings."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

import steptron
from steptron.platform import doctor
from steptron.platform.doctor import Check, Status
from steptron.platform.nodes.peers import Peer, name_ranks
from steptron_kernels import extension

SECTION = "the same everywhere"
ABSENT = "none"

# Another version of these changes numbers, or what is sent to the other processes.
_MUST_BE_EQUAL = (
    "steptron",
    "steptron source",
    "Python",
    "torch",
    "megatron-core",
    "transformer-engine",
    "deep-ep",
    "CUDA",
    "NCCL",
    "device",
    "architecture",
    "native kernels",
)
_SHOULD_BE_EQUAL = ("GPU", "GPU driver", "instruction sets", "C library", "working directory", "settings")
_SETTINGS = re.compile(r"(NCCL|TORCH_NCCL|TORCH_FR|GLOO|NVSHMEM|OMP|UCX|CUBLAS|CUDA_DEVICE)_\w+|CUDA_LAUNCH_BLOCKING")
_NOT_COMPARED = {"OMP_NUM_THREADS", "TORCH_NCCL_BLOCKING_WAIT"}  # set per process by launchers; set by the examination
_DRIVER = Path("/proc/driver/nvidia/version")
_NAMED_VALUES = 4  # different values that a message lists


def own_facts(device: torch.device) -> dict[str, str]:
    """Facts of this process, by name."""
    cuda = device.type == "cuda"
    return {
        "steptron": steptron.__version__,
        "steptron source": _source_digest(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": _version("megatron-core"),
        "transformer-engine": _version("transformer-engine"),
        "deep-ep": _version("deep-ep"),
        "CUDA": torch.version.cuda or ABSENT,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else ABSENT,
        "device": device.type,
        "architecture": platform.machine(),
        "native kernels": _native_build(),
        "GPU": _gpu() if cuda else ABSENT,
        "GPU driver": _driver() if cuda else ABSENT,
        "instruction sets": ", ".join(doctor.instruction_sets()) or ABSENT,
        "C library": " ".join(platform.libc_ver()).strip() or ABSENT,
        "working directory": os.getcwd(),
        "settings": " ".join(
            f"{name}={os.environ[name]}"
            for name in sorted(os.environ)
            if _SETTINGS.fullmatch(name) and name not in _NOT_COMPARED
        )
        or ABSENT,
    }


def compare(facts: Sequence[dict[str, str]], peers: Sequence[Peer]) -> list[Check]:
    """One line per fact: what most processes have, and who has something else.

    Args:
        facts: of each process, by rank.
        peers: all processes.
    """
    must = [_compare(name, [own[name] for own in facts], peers, "failed") for name in _MUST_BE_EQUAL]
    should = [_compare(name, [own[name] for own in facts], peers, "warning") for name in _SHOULD_BE_EQUAL]
    return [*must, *should]


def _compare(name: str, values: list[str], peers: Sequence[Peer], if_not: Status) -> Check:
    counts = Counter(values)
    most = max(counts.values())
    common = next(value for value in values if counts[value] == most)
    if len(counts) == 1:
        return Check(SECTION, name, "off" if common == ABSENT else "ok", common)
    others = [value for value in dict.fromkeys(values) if value != common]
    named = [
        f"{value} on {name_ranks([rank for rank, own in enumerate(values) if own == value], peers)}"
        for value in others[:_NAMED_VALUES]
    ]
    if len(others) > _NAMED_VALUES:
        named.append(f"and {len(others) - _NAMED_VALUES} more values")
    found = f"{common} on {most} of {len(values)} processes"
    return Check(SECTION, name, if_not, found, f"but {'; '.join(named)}: make them equal")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ABSENT


@functools.cache
def _source_digest() -> str:
    """Of the package's own files: nodes that run from different working copies have the same version."""
    root = Path(steptron.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _native_build() -> str:
    """Which native library is used. Not the library's own digest: builds of the same sources need not be bit-equal."""
    if extension.why_unavailable() is not None:
        return ABSENT
    record = json.loads((Path(extension.__file__).parent / extension.RECORD).read_text())
    return f"{(record['sources'] or 'unknown')[:12]} for {', '.join(record['needs']) or 'any processor'}"


def _gpu() -> str:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute {properties.major}.{properties.minor}"
    )


def _driver() -> str:
    """Version of the kernel module, which Linux shows without NVIDIA's libraries."""
    try:
        match = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", _DRIVER.read_text())
    except OSError:
        return "unknown"
    return match[1] if match else "unknown"
