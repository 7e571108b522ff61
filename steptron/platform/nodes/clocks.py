"""How far each node's clock is from the first node's.

Nothing in a training step reads another node's clock. Logs, profiles and file times of several nodes are put in
order by it, and credentials (munge, Kerberos) are refused where it is minutes off.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from steptron.platform.doctor import Check
from steptron.platform.nodes.peers import Peer, ranks_by_node
from steptron.platform.nodes.roll import Roll

SECTION = "clocks"

# A node whose clock is kept by NTP is within milliseconds. At 0.1 s it is not, and phases of a step (tens to
# hundreds of milliseconds) can no longer be put in order over nodes; at 5 s not even the steps of a run can.
WARN_SECONDS = 0.1
FAIL_SECONDS = 5.0

_ROUND_TRIPS = 32
_TOKEN_BYTES = 16
_NODE_BYTES = 4
_TIME_BYTES = 8
_NAMED = 8  # nodes that a message lists


@dataclass(frozen=True)
class Offset:
    """A clock against the first node's, in seconds; positive where it is ahead. The true value is within
    ``uncertainty``: half of the fastest round trip."""

    seconds: float
    uncertainty: float


def measure(roll: Roll, address: str, timeout: float, clock: Callable[[], int] = time.time_ns) -> dict[str, Any] | None:
    """Measures this node's offset; the first process of each node does, one node after the other.

    Node 0 answers over one TCP connection per node: the store, the other way to reach it, is slower and its delays
    are not symmetric.

    Args:
        roll: all processes.
        address: where rank 0 can be reached.
        timeout: longest wait for node 0, or on node 0 for all others, seconds.
        clock: this node's clock, nanoseconds.

    Returns:
        The `Offset`'s fields on the first process of nodes 1, 2, …; None on the others.

    Raises:
        OSError: node 0 cannot be reached, or some node has not come; the message names it.
    """
    nodes = ranks_by_node(roll.peers)
    server = _listen() if roll.is_first and len(nodes) > 1 else None
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    port, token = roll.tell("clock server", None if server is None else (server.getsockname()[1], token)) or (0, token)
    if server is not None:
        with server:
            _answer(server, token, [roll.peers[own[0]] for own in nodes[1:]], timeout, clock)
    elif roll.own.node > 0 and nodes[roll.own.node][0] == roll.rank:
        return asdict(_ask(address, port, token, roll.own.node, timeout, clock))
    return None


def judge(offsets: Sequence[dict[str, Any] | None], peers: Sequence[Peer]) -> list[Check]:
    """The clocks' line of the report.

    Args:
        offsets: what ``measure`` returned on each process.
        peers: all processes.
    """
    measured = [
        (peer.host, Offset(**offset)) for peer, offset in zip(peers, offsets, strict=True) if offset is not None
    ]
    name = f"offset to {peers[0].host}"
    if not measured:
        return [Check(SECTION, name, "off", "one node")]
    host, largest = max(measured, key=lambda item: abs(item[1].seconds))
    value = f"largest {_text(largest)} ({host}), {len(measured) + 1} nodes"
    off = [(host, offset) for host, offset in measured if abs(offset.seconds) - offset.uncertainty > WARN_SECONDS]
    if not off:
        return [Check(SECTION, name, "ok", value)]
    off.sort(key=lambda item: -abs(item[1].seconds))
    named = "; ".join(f"{host} {_text(offset)}" for host, offset in off[:_NAMED])
    more = f"; and {len(off) - _NAMED} more" if len(off) > _NAMED else ""
    failed = any(abs(offset.seconds) - offset.uncertainty > FAIL_SECONDS for _, offset in off)
    advice = f"{named}{more}: start NTP or chrony there (above {WARN_SECONDS:g} s logs and profiles cannot be compared)"
    return [Check(SECTION, name, "failed" if failed else "warning", value, advice)]


def _text(offset: Offset) -> str:
    return f"{offset.seconds * 1e3:+.3f} ms ± {offset.uncertainty * 1e3:.3f}"


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _answer(
    server: socket.socket, token: str, leaders: Sequence[Peer], timeout: float, clock: Callable[[], int]
) -> None:
    """Tells one node after the other the time, so that none waits in the middle of a round trip."""
    deadline = time.monotonic() + timeout
    waiting = {leader.node: leader for leader in leaders}
    while waiting:
        server.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            names = ", ".join(leader.host for leader in list(waiting.values())[:_NAMED])
            raise OSError(f"no connection from {names} ({len(waiting)} in all) within {timeout:g} s") from error
        with connection:
            connection.settimeout(timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, len(token)) != token.encode():
                continue
            node = int.from_bytes(_receive(connection, _NODE_BYTES))
            for _ in range(_ROUND_TRIPS):
                _receive(connection, 1)
                connection.sendall(clock().to_bytes(_TIME_BYTES))
            waiting.pop(node, None)


def _ask(address: str, port: int, token: str, node: int, timeout: float, clock: Callable[[], int]) -> Offset:
    try:
        with socket.create_connection((address, port), timeout) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token.encode() + node.to_bytes(_NODE_BYTES))
            return min((_round_trip(connection, clock) for _ in range(_ROUND_TRIPS)), key=lambda own: own.uncertainty)
    except OSError as error:
        raise OSError(f"rank 0 cannot be asked for the time at {address}:{port}: {error}") from error


def _round_trip(connection: socket.socket, clock: Callable[[], int]) -> Offset:
    sent = clock()
    connection.sendall(b"?")
    there = int.from_bytes(_receive(connection, _TIME_BYTES))
    received = clock()
    return Offset(((sent + received) / 2 - there) / 1e9, (received - sent) / 2e9)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data
