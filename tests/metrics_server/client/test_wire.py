"""What is serialized by hand against the protocol's message classes; the committed descriptors against the source."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.internal.encoder import _EncodeVarint
from grpc_tools import protoc

from steptron_metrics import protocol
from steptron_metrics.client.frame import Layout, Pending, frame_body, frames_message, varint
from steptron_metrics.protocol import messages
from steptron_metrics.protocol.description import Series
from steptron_metrics.results import Event


def test_the_committed_descriptors_are_what_the_source_compiles_to(tmp_path: Path) -> None:
    folder = resources.files(protocol)
    output = tmp_path / "metrics.binpb"
    arguments = [f"-I{folder}", "--include_imports", f"--descriptor_set_out={output}", "metrics.proto"]
    assert protoc.main(["protoc", *arguments]) == 0
    compiled, committed = (
        descriptor_pb2.FileDescriptorSet.FromString(content)
        for content in (output.read_bytes(), folder.joinpath("metrics.binpb").read_bytes())
    )
    assert committed == compiled
    assert len(committed.file) == 1


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 1 << 32, (1 << 64) - 1])
def test_varint(number: int) -> None:
    parts: list[bytes] = []
    _EncodeVarint(parts.append, number)
    assert varint(number) == b"".join(parts)


def test_a_message_made_by_hand_is_the_message() -> None:
    layouts = [Layout.of([Series("a", 2, 1, 300)]), Layout.of([Series("b.c", -1)]), Layout.of([])]
    expected = messages.ToServer()
    expected.frames.number = 1 << 40
    frames, sent = [], {layouts[1].id}
    for index, layout in enumerate(layouts * 2):
        values = np.random.default_rng(index).standard_normal(layout.size, dtype=np.float32).tobytes()
        events = [Event("skipped", "täglich")] * (index % 3)
        body = frame_body(index, 1 << 50, layout, memoryview(values), (1 << 64) - 1, 0.25, 1 << 60, events)
        frame = Pending(index, layout, body, 0.0)
        frame.dropped = 200 * index
        frames.append(frame)
        one = expected.frames.frames.add(
            rank=index,
            iteration=1 << 50,
            description_id=layout.id,
            ended_ns=(1 << 64) - 1,
            seconds=0.25,
            consumed_tokens=1 << 60,
            values=values,
            checksum=messages.checksum(values),
            dropped=200 * index,
        )
        for event in events:
            one.events.add(kind=event.kind, detail=event.detail)
        if layout.id not in sent:
            sent.add(layout.id)
            one.description = layout.content
    assert messages.ToServer.FromString(frames_message(1 << 40, frames, [layouts[1].id])) == expected


def test_an_empty_message_is_one_too() -> None:
    message = messages.ToServer.FromString(frames_message(7, [], []))
    assert message.WhichOneof("content") == "frames"
    assert (message.frames.number, len(message.frames.frames)) == (7, 0)
