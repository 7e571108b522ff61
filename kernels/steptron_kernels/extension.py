"""The compiled library behind the native operations: found, checked, loaded once; or the reason why not.

Importing this module loads no torch: the configuration is checked with it before any process starts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sysconfig
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


def _load(folder: Path) -> str | None:
    import torch

    record_file = folder / RECORD
    if not record_file.exists():
        return f"the native CPU kernels were not built (no torch or no C++ compiler at installation): {REBUILD}"
    try:
        record = json.loads(record_file.read_text())
        if "error" not in record:
            library, torch_version, needs, sources = (record[key] for key in ("library", "torch", "needs", "sources"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the record of the native CPU kernels, {record_file}, cannot be read ({error!r}): {REBUILD}"
    if "error" in record:
        return f"the native CPU kernels were not built: {record['error']}; {REBUILD}"
    if torch_version != torch.__version__:
        return f"the native CPU kernels were built for torch {torch_version}, this is {torch.__version__}: {REBUILD}"
    if sources != (digest := sources_digest(folder)) and digest is not None:
        return f"the C++ sources of the native CPU kernels have changed since they were built: {REBUILD}"
    if platform.machine() == "x86_64" and (missing := sorted(set(needs) - cpu_flags())):
        return (
            f"the native CPU kernels were built for a processor with {', '.join(missing)}, unlike this one: {REBUILD}"
        )
    try:
        torch.ops.load_library(str(folder / library))
    except OSError as error:
        return f"the native CPU kernels cannot be loaded ({error}): {REBUILD}"
    return None
