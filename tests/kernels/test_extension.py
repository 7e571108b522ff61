"""Whether the compiled library fits this machine, and what is said where it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from steptron_kernels import extension


@pytest.fixture
def record(tmp_path: Path) -> Any:
    """Writes the record of a build into a folder without C++ sources, and says what loading it gives."""

    def load(**changes: object) -> str | None:
        folder = Path(extension.__file__).parent
        built = json.loads((folder / extension.RECORD).read_text())
        shutil.copy(folder / built["library"], tmp_path)
        (tmp_path / extension.RECORD).write_text(json.dumps(built | changes))
        return extension.why_unfit(tmp_path)

    return load


def test_the_library_of_this_environment_is_there() -> None:
    assert extension.why_unavailable() is None


def test_never_built(tmp_path: Path) -> None:
    reason = extension._load(tmp_path)
    assert reason is not None and "were not built" in reason and "make native" in reason


def test_failed_build(record: Any) -> None:
    assert "FileNotFoundError: c++; rebuild" in record(error="FileNotFoundError: c++")


def test_another_torch(record: Any) -> None:
    assert f"were built for torch 1.0, this is {metadata.version('torch')}" in record(torch="1.0")


def test_another_processor(record: Any) -> None:
    assert "built for a processor with sse99, unlike this one" in record(needs=["sse99"])


def test_changed_sources(record: Any, tmp_path: Path) -> None:
    (tmp_path / "one.cpp").write_text("int one;")
    assert "C++ sources of the native CPU kernels have changed" in record()
    assert record(sources=extension.sources_digest(tmp_path)) is None


def test_broken_library(record: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_text("no library")
    assert record(library="broken.so", bytes=10) is None
    reason = extension._load(tmp_path)
    assert reason is not None and "cannot be loaded" in reason


def test_truncated_or_missing_library(record: Any) -> None:
    """A truncated one would end the process when it is loaded."""
    assert "missing or damaged" in record(bytes=1)
    assert "missing or damaged" in record(library="none.so")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"library": "x.so"}'])
def test_a_damaged_record(tmp_path: Path, content: str) -> None:
    (tmp_path / extension.RECORD).write_text(content)
    reason = extension._load(tmp_path)
    assert reason is not None and "cannot be read" in reason and "make native" in reason


def test_a_build_that_fails_says_why_where_it_is_looked_for(tmp_path: Path) -> None:
    """In place, as `make native` and editable installations build; the earlier record goes."""
    package = tmp_path / "steptron_kernels"
    package.mkdir()
    for name in ("__init__.py", "build.py", "extension.py"):
        shutil.copy(Path(extension.__file__).parent / name, package / name)
    (package / "one.cpp").write_text("this is no C++")
    (package / extension.RECORD).write_text('{"library": "of an earlier build"}')
    (tmp_path / "setup.py").write_text(
        "from pathlib import Path\n"
        "from setuptools import setup\n"
        "from steptron_kernels.build import BuildNative, native_extension\n"
        "kernels = native_extension(Path('steptron_kernels'))\n"
        "setup(name='x', ext_modules=[kernels], cmdclass={'build_ext': BuildNative})\n"
    )
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert "the native CPU kernels were not built" in run.stderr
    reason = extension._load(package)
    assert reason is not None and "were not built: " in reason and "no torch" not in reason
