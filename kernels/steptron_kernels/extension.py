"""The compiled library behind the native operations: found, checked, loaded once; or the reason why not.

Importing this module loads no torch: the configuration is checked with it before any process starts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sysconfig
from importlib import metadata
from pathlib import Path

_FOLDER = Path(__file__).parent
RECORD = f"_native{sysconfig.get_config_var('EXT_SUFFIX').removesuffix('.so')}.json"
"""What was built, or why nothing was; per Python version, since several environments may share the folder."""
REBUILD = (
    "rebuild them with `make native`, or `pip install --no-build-isolation --no-deps -e .` in the project's folder"
)


class NativeUnavailableError(Exception):
    """The native CPU kernels cannot be used; the message says why and what to do."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this processor, as Linux names them; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


@functools.cache
def why_unavailable() -> str | None:
    """None once the native library is loaded; otherwise the reason, with what to do about it."""
    return _load(_FOLDER)


def require() -> None:
    """Loads the native library.

    Raises:
        NativeUnavailableError: there is none for this torch and processor.
    """
    if (reason := why_unavailable()) is not None:
        raise NativeUnavailableError(reason)


def has_fast_bf16() -> bool:
    """Whether bfloat16 products are faster than float32 on this processor.

    They are 1.9 times as fast with AVX512-BF16 (measured on AMD EPYC), more with AMX; without either they are emulated.
    """
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})


def sources_digest(folder: Path) -> str | None:
    """Digest of the C++ sources; None where they are not there, as in an installed wheel."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".cpp", ".h"))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def why_unfit(folder: Path = _FOLDER) -> str | None:
    """Why the library of a folder does not fit this environment and processor; None where it does. Loads nothing."""
    record_file = folder / RECORD
    if not record_file.exists():
        return f"the native CPU kernels were not built (no torch at installation, or it was broken off): {REBUILD}"
    try:
        record = json.loads(record_file.read_text())
        if "error" in record:
            return f"the native CPU kernels were not built: {record['error']}; {REBUILD}"
        library, size, torch, sources = (record[key] for key in ("library", "bytes", "torch", "sources"))
        needs = set(record["needs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the record of the native CPU kernels, {record_file}, cannot be read ({error!r}): {REBUILD}"
    if torch != (present := metadata.version("torch")):
        return f"the native CPU kernels were built for torch {torch}, this is {present}: {REBUILD}"
    if sources != (digest := sources_digest(folder)) and digest is not None:
        return f"the C++ sources of the native CPU kernels have changed since they were built: {REBUILD}"
    if platform.machine() == "x86_64" and (missing := sorted(needs - cpu_flags())):
        return (
            f"the native CPU kernels were built for a processor with {', '.join(missing)}, unlike this one: {REBUILD}"
        )
    file = folder / library
    if not file.exists() or file.stat().st_size != size:
        return f"the native CPU kernels, {file}, are missing or damaged: {REBUILD}"
    return None


def _load(folder: Path) -> str | None:
    if (reason := why_unfit(folder)) is not None:
        return reason
    import torch

    library = folder / json.loads((folder / RECORD).read_text())["library"]
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"the native CPU kernels cannot be loaded ({error.__cause__ or error}): {REBUILD}"
    return None
