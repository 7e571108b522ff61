"""What docs/metrics_protocol.md shows is true: its programs run, its bytes are the protocol's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from grpc_tools import protoc

from steptron_metrics import protocol
from steptron_metrics.protocol import messages
from tests.metrics_server.client.fake_server import FakeServer, Store

PAGE = (Path(__file__).parents[3] / "docs" / "metrics_protocol.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    [content] = re.findall(rf"^```{start}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(content)


def shown_bytes(name: str) -> bytes:
    pairs = [re.match(r"\s*((?:[0-9a-f]{2} ?)+)(?:\s|$)", line) for line in block(f"bytes {name}").splitlines()]
    return b"".join(bytes.fromhex(pair[1]) for pair in pairs if pair)


def run(program: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, program, *arguments], capture_output=True, text=True, timeout=60, cwd=program.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.py312
def test_the_example_with_the_client(store: Store, tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(block("python\n# example: client.py"), encoding="utf-8")
    assert len(program.read_text(encoding="utf-8").splitlines()) <= 35
    with FakeServer(store) as server:
        assert "stored=10," in run(program, server.address, tmp_path / "spool")
    assert sorted(key[3] for key in store.frames) == list(range(1, 11))
    assert [store.values(key)[0] for key in sorted(store.frames)] == pytest.approx([2 / step for step in range(1, 11)])


def test_the_client_needs_no_torch(tmp_path: Path) -> None:
    program = tmp_path / "imports.py"
    program.write_text(
        "import sys, steptron_metrics.client\n"
        "print([name for name in ('torch', 'steptron', 'pandas', 'duckdb', 'pyarrow') if name in sys.modules])\n"
    )
    assert run(program) == "[]\n"


def test_the_example_with_generated_stubs(store: Store, tmp_path: Path) -> None:
    source = Path(protocol.__file__).parent
    assert (
        protoc.main(
            ["protoc", f"-I{source}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", "metrics.proto"]
        )
        == 0
    )
    program = tmp_path / "stubs.py"
    program.write_text(block("python\n# example: stubs.py"), encoding="utf-8")
    with FakeServer(store) as server:
        run(program, server.address)
    assert [store.values(key)[0] for key in sorted(store.frames)] == pytest.approx([2, 1, 2 / 3])
    assert store.metadata[0]["authorization"] == "Bearer my-token"


def test_the_bytes_shown() -> None:
    session = messages.Session(run="demo", started_ns=1_764_000_000_000_000_000, world_size=8)
    hello = messages.ToServer(hello=messages.Hello(protocol=protocol.VERSION, session=session, client="demo 1"))
    assert shown_bytes("hello") == hello.SerializeToString()
    description = messages.Description(
        series=[
            messages.Series(metric="train.loss", layer=-1, count=1),
            messages.Series(metric="moe.tokens", layer=4, first=8, count=2),
        ]
    ).SerializeToString()
    values = bytes.fromhex("0000c03f 0000c042 00002043")
    frame = messages.Frame(
        rank=3,
        iteration=7,
        description_id=messages.checksum(description),
        description=description,
        ended_ns=1_764_000_000_000_000_000,
        seconds=0.25,
        consumed_tokens=28672,
        values=values,
        checksum=messages.checksum(values),
    )
    frames = messages.ToServer(frames=messages.Frames(number=1, frames=[frame]))
    assert shown_bytes("frames") == frames.SerializeToString()
    assert f"{frame.description_id:016x}" in PAGE and f"{frame.checksum:016x}" in PAGE
