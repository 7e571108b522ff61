"""Compiles the native CPU kernels; setup.py's part of this package.

They are built for the processor of the machine that builds (or for STEPTRON_MARCH, as gcc names
processors: ``x86-64-v3`` for an image that has to run on several). What the result needs is written
beside it, so that a machine that lacks it is told so instead of crashing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from setuptools import Extension
from torch.utils.cpp_extension import BuildExtension, CppExtension

from steptron_kernels.extension import RECORD, sources_digest

_MACROS = {
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__BMI2__": "bmi2",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512VL__": "avx512vl",
    "__AVX512DQ__": "avx512dq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512VNNI__": "avx512_vnni",
    "__AMX_TILE__": "amx_tile",
}
"""Compiler's macro of an instruction set: its name in /proc/cpuinfo."""


def native_extension(folder: Path) -> Extension:
    """The extension, from every C++ file of the package."""
    flags = ["-O3", "-g0", *_target(), "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-std=c++20", "-Wno-psabi"]
    return CppExtension(
        "steptron_kernels._native",
        sorted(str(path) for path in folder.rglob("*.cpp")),
        depends=sorted(str(path) for path in folder.rglob("*.h")),
        extra_compile_args=flags,
    )


def _target() -> list[str]:
    target = os.environ.get("STEPTRON_MARCH", "native")
    return [f"-march={target}", "-mprefer-vector-width=512"] if os.uname().machine == "x86_64" else []


class BuildNative(BuildExtension):
    """Builds, and writes beside the library what it needs, or why there is none."""

    def run(self) -> None:
        record_file = Path(self.get_ext_fullpath("steptron_kernels._native")).parent / RECORD
        record_file.unlink(missing_ok=True)  # what is half built is not to be loaded
        error = "the compiler failed: `make native` shows its words"
        built, inplace = False, self.inplace
        try:
            super().run()
            built = True
        except Exception as raised:  # a missing compiler or header surfaces in many ways
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self.inplace = inplace  # setuptools restores it after a success only
        library = Path(self.get_ext_fullpath("steptron_kernels._native"))
        if built and library.exists():
            record: dict[str, object] = {
                "library": library.name,
                "torch": metadata.version("torch"),
                "bytes": library.stat().st_size,
                "needs": _needs(),
                "sources": sources_digest(Path(__file__).parent),
            }
        else:
            record = {"error": error}
            print(f"steptron: the native CPU kernels were not built: {error}", file=sys.stderr)
        record_file.parent.mkdir(parents=True, exist_ok=True)
        partial = record_file.with_suffix(".partial")
        partial.write_text(json.dumps(record) + "\n")
        partial.replace(record_file)


def _needs() -> list[str]:
    """Instruction sets that the compiler was allowed to use."""
    command = [os.environ.get("CXX", "c++"), *_target(), "-dM", "-E", "-x", "c++", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    macros = {line.split()[1] for line in output.splitlines()}
    return [flag for macro, flag in _MACROS.items() if macro in macros]
