"""The message classes of ``metrics.proto``.

They are made from the compiled descriptors in ``metrics.binpb`` (docs/metrics_protocol.md says how to compile them)
instead of generated modules, which run with one range of protobuf releases only.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import xxhash
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "steptron.metrics.v1"
SERVICE = f"{PACKAGE}.Metrics"
METHOD = "Send"


def _pool() -> descriptor_pool.DescriptorPool:
    content = resources.files(__package__).joinpath("metrics.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.Add(file)
    return pool


_POOL = _pool()


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


def _enum(name: str) -> dict[str, int]:
    return {value.name: value.number for value in _POOL.FindEnumTypeByName(f"{PACKAGE}.{name}").values}


ToServer, ToClient = _message("ToServer"), _message("ToClient")
Hello, Welcome, Session = _message("Hello"), _message("Welcome"), _message("Session")
Frames, Frame, Event = _message("Frames"), _message("Frame"), _message("Event")
Description, Series = _message("Description"), _message("Series")
Answer, Refusal, Request = _message("Answer"), _message("Refusal"), _message("Request")

STORED, LATER, REFUSED = (_enum("Result")[f"RESULT_{name}"] for name in ("STORED", "LATER", "REFUSED"))
CHECKPOINT = _enum("RequestKind")["REQUEST_CHECKPOINT"]


def checksum(content: bytes | memoryview) -> int:
    """XXH3, 64 bits, seed 0: of values, and the id of a serialized description."""
    return xxhash.xxh3_64_intdigest(content)
