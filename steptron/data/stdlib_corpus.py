"""Real text that every Python brings along: the sources of its standard library."""

from __future__ import annotations

import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steptron.data.errors import DataError
from steptron.data.readers import recorded_name
from steptron.platform.staging import staging_file

# Folders left out wherever they stand: tests (some of them deliberately broken sources), caches, and
# packages that are not part of the standard library.
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "testing"})
_OTHER_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class CorpusReport:
    """What was written.

    Attributes:
        path: the JSONL file; one document per source file, fields ``text`` and ``source``.
        documents, bytes: source files and UTF-8 bytes of their text, all together.
        package_documents, package_bytes: those of them from installed packages rather than the
            standard library.
        skipped: source files that are empty or cannot be decoded.
    """

    path: Path
    documents: int
    bytes: int
    package_documents: int
    package_bytes: int
    skipped: int


def collect(destination: Path, minimum_bytes: int = 5_000_000) -> CorpusReport:
    """Writes the sources of the running interpreter's standard library as JSONL, tests left out.

    Below ``minimum_bytes`` (some systems ship a reduced library) sources of the installed packages
    are added, package by package, until the minimum is reached or there are no more.

    Raises:
        DataError: no sources are found.
    """
    standard_library = Path(sysconfig.get_path("stdlib"))
    documents = num_bytes = package_documents = package_bytes = skipped = 0
    with staging_file(destination) as partial:
        with open(partial, "w", encoding="utf-8") as file:
            for path in _sources(standard_library):
                text = _text(path)
                if text is None:
                    skipped += 1
                    continue
                file.write(_line(text, standard_library, path))
                documents += 1
                num_bytes += len(text.encode("utf-8"))
            for root in _package_roots():
                for package in sorted(root.iterdir()):
                    if num_bytes >= minimum_bytes:
                        break
                    for path in _sources(package):
                        text = _text(path)
                        if text is None:
                            skipped += 1
                            continue
                        file.write(_line(text, root, path))
                        package_documents += 1
                        package_bytes += (size := len(text.encode("utf-8")))
                        documents += 1
                        num_bytes += size
        if documents == 0:
            raise DataError(
                f"{standard_library}: no sources of the standard library here; install them (on Debian and Ubuntu: "
                "apt-get install libpython3-stdlib), or build a dataset from text of your own"
            )
    return CorpusReport(destination, documents, num_bytes, package_documents, package_bytes, skipped)


def _package_roots() -> list[Path]:
    roots = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    return [root for root in roots if root.is_dir()]


def _sources(root: Path) -> Iterator[Path]:
    """Python sources below a folder, or the file itself, in a fixed order."""
    if root.is_file():
        if root.suffix == ".py":
            yield root
        return
    if root.name in _TEST_FOLDERS | _OTHER_FOLDERS:
        return
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _TEST_FOLDERS | _OTHER_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(parent, name)


def _text(path: Path) -> str | None:
    """Text of a source file by its own declared encoding; None if it is empty or cannot be decoded."""
    try:
        with tokenize.open(path) as file:
            return file.read() or None
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def _line(text: str, root: Path, path: Path) -> str:
    """A record with the metadata that `steptron data build --metadata-fields` can prepend."""
    record = {
        "text": text,
        "content_type": "code",
        "language": "python",
        "domain": path.relative_to(root).parts[0].removesuffix(".py") if path != root else root.stem,
        "source": recorded_name(path.relative_to(root.parent)),
    }
    return json.dumps(record, ensure_ascii=False) + "\n"
