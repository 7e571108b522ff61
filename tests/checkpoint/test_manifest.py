"""The manifest: what was written is read, and anything else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steptron.checkpoint.folder import MANIFEST
from steptron.checkpoint.manifest import read_manifest, write_manifest
from steptron.checkpoint.verification import problems
from steptron.errors import UserError
from tests.checkpoint.made import make


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = make(tmp_path, 3, loss=0.1 + 0.2)
    manifest = read_manifest(folder)
    assert manifest.progress is not None and manifest.progress.recent_losses == (6.25, 1e-07, 3.141592653589793)
    assert manifest.validation_loss == 0.30000000000000004
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest


def test_a_changed_digit_of_the_progress_is_found(tmp_path: Path) -> None:
    """It is valid JSON of the right form: only the checksum of the manifest itself shows it."""
    folder = make(tmp_path, 3)
    file = folder / MANIFEST
    text = file.read_text()
    assert text.count('"consumed_sequences": 24') == 1
    file.write_text(text.replace('"consumed_sequences": 24', '"consumed_sequences": 25'))
    with pytest.raises(UserError, match=r"steptron\.json has other content than was written"):
        read_manifest(folder)
    for contents in (True, False):
        (problem,) = problems(folder, contents)
        assert problem.startswith(f"{MANIFEST} has other content than was written")


def test_a_manifest_without_its_checksum_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, 3)
    content = json.loads((folder / MANIFEST).read_text())
    del content["manifest_xxh3_128"]
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match="has other content than was written"):
        read_manifest(folder)


def test_whatever_bit_flips_the_manifest_is_refused_or_says_the_same(tmp_path: Path) -> None:
    """Every seventh bit: `e` and `E` in a number, for one, are the same to JSON."""
    folder = make(tmp_path, 3)
    file, manifest = folder / MANIFEST, read_manifest(folder)
    content = file.read_bytes()
    refused = 0
    for number in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[number // 8] ^= 1 << number % 8
        file.write_bytes(damaged)
        try:
            assert read_manifest(folder) == manifest
        except UserError as error:
            refused += 1
            assert str(folder) in str(error)
    assert refused > 8 * len(content) // 7 - 5


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_manifest_that_was_cut_off_is_refused(tmp_path: Path, length: int) -> None:
    folder = make(tmp_path, 3)
    file = folder / MANIFEST
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(UserError, match=r"steptron\.json cannot be read"):
        read_manifest(folder)
