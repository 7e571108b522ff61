"""Sums of files, and what is said of files that differ."""

from __future__ import annotations

from pathlib import Path

import xxhash

from steptron.checkpoint.checksums import FileSum, fault, file_sum, text_sum
from tests.checkpoint.made import flip

BUFFER = 1 << 20


def test_the_sum_is_that_of_the_whole_content(tmp_path: Path) -> None:
    """Shorter than a buffer, one exactly, and with a rest that leaves an older end of the buffer behind."""
    file = tmp_path / "file"
    for size in (0, 1, BUFFER - 1, BUFFER, 2 * BUFFER + 17):
        content = bytes(number % 251 for number in range(size))
        file.write_bytes(content)
        told: list[int] = []
        assert file_sum(file, told.append) == FileSum(bytes=size, xxh3_128=xxhash.xxh3_128_hexdigest(content))
        assert sum(told) == size
    # XXH3's published value for no input.
    assert text_sum("") == "99aa06d3014798d86001c324468d497f"


def test_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.write_bytes(bytes(5000))
    expected = file_sum(file)
    assert fault(tmp_path, "shard", expected) is None
    flip(file, 4999, bit=0)
    assert fault(tmp_path, "shard", expected, contents=False) is None
    text = fault(tmp_path, "shard", expected)
    assert text == "shard has other content than was written (its checksum differs): it is damaged"
    file.write_bytes(bytes(4000))
    told: list[int] = []
    text = fault(tmp_path, "shard", expected, report=told.append)
    assert text == "shard has 4,000 bytes, it was written with 5,000: it was cut off or changed"
    assert told == []
    file.unlink()
    assert fault(tmp_path, "shard", expected) == "shard is missing"
    file.mkdir()
    assert (fault(tmp_path, "shard", FileSum(bytes=file.stat().st_size, xxh3_128="")) or "").startswith(
        "shard cannot be read: "
    )
