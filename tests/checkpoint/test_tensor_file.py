"""The bytes of a checkpoint's file against what torch.save writes and reads."""

from __future__ import annotations

import errno
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.serialization import get_crc32_options, set_crc32_options

from steptron.checkpoint.checksums import file_sum
from steptron.checkpoint.tensor_file import write_tensor_file


def item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.TENSOR)


def saved(tensor: torch.Tensor) -> bytes:
    """By torch.save, without the CRC-32 of the bytes."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        return stream.getvalue()
    finally:
        set_crc32_options(before)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    square = torch.randn(12, 12, generator=generator)
    return [
        square,
        torch.randn(12, 12, generator=generator),  # the same archive around other bytes
        square.T.contiguous(),
        square.clone().T,
        square[3:5],  # the whole storage goes with it
        square.bfloat16(),
        torch.randn(12, 12, generator=generator).half(),
        torch.tensor(3.5, dtype=torch.float64),
        torch.zeros(0),
        torch.zeros(0, 4),
        torch.tensor([True, False]),
        torch.randint(0, 255, (5000,), dtype=torch.uint8, generator=generator),  # as states of generators
        torch.randn(300, 700, generator=generator),  # beyond the stream's buffer
        torch.nn.Parameter(torch.randn(12, 12, generator=generator)),
    ]


def test_every_item_is_what_torch_would_have_written(tmp_path: Path) -> None:
    objects = [(item("a"), io.BytesIO(b"first")), (item("b"), io.BytesIO(b""))]
    written = tensors()
    path = tmp_path / "__0_0.distcp"
    results, total = write_tensor_file(
        path, objects, [(item(str(number)), tensor) for number, tensor in enumerate(written)]
    )
    assert total == file_sum(path)
    content = path.read_bytes()
    end = 0
    expected = [data.getvalue() for _, data in objects] + [saved(tensor.detach()) for tensor in written]
    assert len(results) == len(expected)
    for result, piece in zip(results, expected, strict=True):
        place = result.storage_data
        assert (place.relative_path, place.offset) == ("__0_0.distcp", end)
        assert place.length == result.size_in_bytes == len(piece)
        end += place.length
        assert content[place.offset : end] == piece
    assert end == len(content)
    for result, tensor in zip(results[2:], written, strict=True):
        start = result.storage_data.offset
        read = torch.load(io.BytesIO(content[start : start + result.storage_data.length]), weights_only=True)
        assert read.dtype == tensor.dtype and read.stride() == tensor.stride() and torch.equal(read, tensor)
    assert [result.index.fqn for result in results] == ["a", "b", *map(str, range(len(written)))]


def test_others_go_on_with_checksums_of_their_own(tmp_path: Path) -> None:
    assert get_crc32_options()
    write_tensor_file(tmp_path / "file", [], [(item("a"), torch.zeros(3))])
    assert get_crc32_options()


def test_threads_that_write_at_the_same_time_do_not_see_each_other(tmp_path: Path) -> None:
    shapes = [(rows, columns) for rows in range(1, 16) for columns in range(1, 16)]
    written = [torch.full(shape, value) for value in (1.0, 2.0) for shape in shapes]

    def write(number: int) -> bytes:
        path = tmp_path / str(number)
        write_tensor_file(path, [], [(item(str(index)), tensor) for index, tensor in enumerate(written)])
        return path.read_bytes()

    with ThreadPoolExecutor(8) as threads:
        contents = list(threads.map(write, range(8)))
    assert get_crc32_options()
    expected = b"".join(saved(tensor) for tensor in written)
    assert [content == expected for content in contents] == [True] * 8


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_full_disk_is_an_error(size: int) -> None:
    with pytest.raises(OSError) as raised:
        write_tensor_file(Path("/dev/full"), [], [(item("a"), torch.zeros(size))])
    assert raised.value.errno == errno.ENOSPC
