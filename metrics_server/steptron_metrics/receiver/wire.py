"""Reads large messages without copying their values.

The protobuf library copies a bytes field twice until Python has it. For frames of more than some 32 KiB that costs more
than finding the field by hand; the rest of the message is still read by the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steptron_metrics.protocol import messages

_MIN_FRAME_BYTES = 32 << 10

_TO_SERVER_FRAMES = 0x12
_FRAMES_NUMBER = 0x08
_FRAMES_FRAME = 0x12
_FRAME_VALUES = 0x42
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class _Unusual(Exception):
    """The message is malformed, or well-formed in a way that clients do not use: the library is to read it."""


def read(content: bytes) -> tuple[Any, Sequence[bytes | memoryview]]:
    """Reads a message to the server.

    Returns:
        The message, and the values of its frames; the message's own ``values`` may be empty.

    Raises:
        DecodeError: it is malformed.
    """
    if len(content) >= _MIN_FRAME_BYTES:
        try:
            rest, values = _split(content)
        except (_Unusual, IndexError):
            pass
        else:
            message = messages.ToServer.FromString(rest)
            if len(message.frames.frames) == len(values):
                return message, values
    message = messages.ToServer.FromString(content)
    return message, [frame.values for frame in message.frames.frames]


def _split(content: bytes) -> tuple[bytes, list[memoryview]]:
    """A message without its frames' values, and these."""
    view = memoryview(content)
    if content[0] != _TO_SERVER_FRAMES:
        raise _Unusual
    length, at = _varint(content, 1)
    if at + length != len(content):
        raise _Unusual
    rest: list[bytes] = []
    values: list[memoryview] = []
    while at < len(content):
        tag = content[at]
        if tag == _FRAMES_NUMBER:
            _, end = _varint(content, at + 1)
            rest.append(content[at:end])
        elif tag == _FRAMES_FRAME:
            length, begin = _varint(content, at + 1)
            end = begin + length
            if length < _MIN_FRAME_BYTES or end > len(content):
                raise _Unusual
            first, last, field = _find_values(content, begin, end)
            values.append(view[first:last])
            kept = content[begin:field] + content[last:end]
            rest += (bytes([_FRAMES_FRAME]), _encode_varint(len(kept)), kept)
        else:
            raise _Unusual
        at = end
    body = b"".join(rest)
    return bytes([_TO_SERVER_FRAMES]) + _encode_varint(len(body)) + body, values


def _find_values(content: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Where a frame's values begin and end, and where their field begins."""
    found: tuple[int, int, int] | None = None
    while at < end:
        field = at
        tag, at = _varint(content, at)
        kind = tag & 7
        if kind == _LENGTH:
            length, at = _varint(content, at)
            if tag == _FRAME_VALUES:
                if found is not None:
                    raise _Unusual
                found = at, at + length, field
            at += length
        elif kind == _VARINT:
            _, at = _varint(content, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        else:
            raise _Unusual
    if at != end or found is None:
        raise _Unusual
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next byte is."""
    number = shift = 0
    while True:
        byte = content[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise _Unusual


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
