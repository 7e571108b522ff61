"""Signs of life of a run's processes: who died, who hangs, and where.

To the others, a process that died shows as a broken connection, one that hangs as a wait without an end. Here a thread
of each process gives signs of life through the store at which the processes met, looks after the next rank's, and ends
its process with a message that names the cause when the main thread cannot.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from steptron.errors import PeerError, UserError

STACKS = "stacks"
"""Folder in a run's output with the stacks of the processes of a run that hung."""

_FAULT, _HANG, _LOOKING = "fault", "hang", "looking"
_NAMED = 8
_STORE_SECONDS = 10.0
_WAITING = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}megatron{os.sep}core{os.sep}")
"""Code in which a process waits for others."""


class Watch:
    """A context in which this process gives signs of life, and ends when another one no longer does.

    Leaving it with an exception from a collective raises :class:`PeerError` instead, if another process is the cause.

    Args:
        store: where the processes met.
        rank, size: of this process, and the number of processes.
        dead_after: a process counts as dead after so many seconds without a sign of life.
        hang_after: the run counts as hanging after so many seconds without :meth:`progress`; never when None.
        output: folder of the run; ``stacks/`` in it gets the stacks of the processes of a run that hangs.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, dead_after: float, hang_after: float | None, output: Path
    ) -> None:
        # A connection of its own: the main thread may wait in its one.
        own = store.clone() if size > 1 else store  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("watch", own)
        self._store.set_timeout(timedelta(seconds=max(_STORE_SECONDS, dead_after)))
        self._rank, self._size = rank, size
        self._dead_after, self._hang_after = dead_after, hang_after
        # With thousands of processes the store must not be busy with signs of life alone.
        self._interval = min(max(dead_after / 60, size / 1000, 0.05), dead_after / 5)
        self._stacks = output / STACKS
        self._main = threading.main_thread().ident or 0
        self._beats = 0
        self._doing: str | None = None
        self._since = time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def progress(self, doing: str) -> None:
        """The main thread got on, and now does this (such as "step 12"). The run hangs if that takes too long."""
        self._since = time.monotonic()
        self._doing = doing

    def __enter__(self) -> Watch:
        self._give_sign()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        if error is not None and threading.current_thread() is threading.main_thread():
            # The process ends within seconds anyway, and should be able to say why.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if error is None:
            self._leave("done", self._dead_after)
            return
        own = f"rank {self._rank} of {self._size} ({_whereabouts()}) ended with {_in_short(error)}"
        if (
            isinstance(error, Exception)
            and not isinstance(error, UserError)
            and (cause := self._cause(own)) is not None
        ):
            raise PeerError(f"{cause}\n  this process, rank {self._rank}, noticed by: {_in_short(error)}") from error
        if not isinstance(error, PeerError):
            self._declare(own)
        self._leave_failed()

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        next_rank = (self._rank + 1) % self._size
        seen, seen_at, silent_since = "", time.monotonic(), None
        while not self._left.wait(self._interval):
            try:
                self._give_sign()
                if self._store.check([_FAULT]):
                    self._end(self._read(_FAULT))
                if self._store.check([_HANG]):
                    self._hang(self._read(_HANG))
                now = time.monotonic()
                if self._hang_after is not None and self._doing is not None and now - self._since > self._hang_after:
                    self._store.compare_set(_HANG, "", f"{self._doing}: no progress for {self._hang_after:g} s")
                    continue
                if self._size > 1:
                    sign = self._sign_of(next_rank)
                    if sign != seen or self._store.check([f"left/{next_rank}"]):
                        seen, seen_at = sign, now
                    elif now - seen_at > self._dead_after:
                        self._declare(self._describe_dead(self._silent()) or self._describe_dead([next_rank]))
                silent_since = None
            except RuntimeError as error:  # the store's process is gone, or does not answer
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > min(3 * self._interval, self._dead_after):
                    self._end(self._store_is_gone(error))

    def _give_sign(self) -> None:
        self._beats += 1
        self._store.set(f"sign/{self._rank}", f"{self._beats} {_whereabouts()}")

    def _end(self, cause: str) -> None:
        """Ends the process, whose main thread is somewhere in a wait, unless it leaves by itself."""
        if self._left.wait(2 * self._interval + 1.0):
            return
        print(f"steptron: rank {self._rank} of {self._size} ends: {cause}", file=sys.stderr, flush=True)
        if self._rank == 0:
            self._leave_failed()
        sys.stdout.flush()
        os._exit(PeerError.exit_code)

    def _hang(self, what: str) -> None:
        """Writes this process's stacks and says where its main thread is; the first rank sums up for all."""
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank-{self._rank:05d}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        frame = sys._current_frames().get(self._main)
        self._store.set(f"where/{self._rank}", json.dumps(_place(frame)))
        if self._rank == 0:
            self._declare(f"the run hangs: {what}. {self._sum_up()}\n  stacks of all processes: {self._stacks}")
        while not self._left.is_set() and not self._store.check([_FAULT]):
            self._give_sign()
            time.sleep(self._interval)
        self._end(self._read(_FAULT))

    def _sum_up(self) -> str:
        """Of a hanging run: who gives no answer, who does not wait for others, where the others wait."""
        deadline = time.monotonic() + max(5 * self._interval, 2.0)
        missing = list(range(self._size))
        while missing and time.monotonic() < deadline:
            self._give_sign()
            missing = [rank for rank in missing if not self._store.check([f"where/{rank}"])]
            time.sleep(self._interval)
        places = {rank: json.loads(self._read(f"where/{rank}")) for rank in range(self._size) if rank not in missing}
        busy = {rank: place for rank, place in places.items() if not place["waits"]}
        parts = []
        if missing:
            parts.append(f"No answer (stopped, or without a CPU): {self._names(missing)}")
        parts += [f"Not waiting for others: {self._names([rank])} at {place['at']}" for rank, place in _few(busy)]
        waiting: dict[str, list[int]] = {}
        for rank, place in places.items():
            if place["waits"]:
                waiting.setdefault(place["at"], []).append(rank)
        parts += [f"Waiting at {at}: {self._names(ranks)}" for at, ranks in _few(waiting)]
        return "\n  ".join(parts)

    # -------------------------------------------------------------------------------------- the cause

    def _cause(self, own: str) -> str | None:
        """After a collective has failed: what another process did; None if this one seems to be the first to fail."""
        try:
            # One looks for all: thousands that ask after everybody would keep the store from its work.
            if not self._fault_within(1.0) and (self._is_first_to_look() or not self._fault_within(2 * self._look())):
                dead = self._silent()
                self._declare(self._describe_dead(dead) if dead else own)
            cause = self._read(_FAULT)
            self._leave_failed()
        except RuntimeError as error:
            return self._store_is_gone(error)
        return None if cause == own else cause

    def _fault_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check([_FAULT]):
            if time.monotonic() > deadline:
                return False
            self._give_sign()
            time.sleep(0.05)
        return True

    def _is_first_to_look(self) -> bool:
        own = str(self._rank)
        return self._store.compare_set(_LOOKING, "", own).decode() == own

    def _look(self) -> float:
        """Seconds without a sign after which a process counts as silent."""
        # Longer than the longest pause between two signs of a process that is short of CPU.
        return max(3 * self._interval, min(self._dead_after, 3.0))

    def _silent(self) -> list[int]:
        """Ranks that give no sign of life during a few intervals and have not left."""
        if self._size == 1:
            return []
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        before = self._signs(ranks)
        deadline = time.monotonic() + self._look()
        while before and time.monotonic() < deadline:
            self._give_sign()
            time.sleep(self._interval)
            now = self._signs(before)
            before = {rank: sign for rank, sign in before.items() if now[rank] == sign}
        return [rank for rank in before if not self._store.check([f"left/{rank}"])]

    def _signs(self, ranks: Sequence[int] | Mapping[int, str]) -> dict[int, str]:
        return {rank: self._sign_of(rank) for rank in ranks}

    def _sign_of(self, rank: int) -> str:
        key = f"sign/{rank}"
        return self._read(key) if self._store.check([key]) else ""

    def _describe_dead(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return ""
        return f"no sign of life from {self._names(ranks)}: killed, stopped, or its machine or network is gone"

    def _names(self, ranks: Sequence[int]) -> str:
        shown = [f"{rank} ({self._sign_of(rank).partition(' ')[2] or 'never seen'})" for rank in ranks[:_NAMED]]
        more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more} of {self._size}"

    def _store_is_gone(self, error: Exception) -> str:
        return (
            f"rank 0 of {self._size}, or the launcher that keeps the store where the processes meet, is gone or does "
            f"not answer: {_in_short(error)}"
        )

    # -------------------------------------------------------------------------------------- the store

    def _declare(self, cause: str) -> None:
        """Tells everybody what happened, if nobody has before."""
        with contextlib.suppress(RuntimeError):  # nobody is left to be told
            self._store.compare_set(_FAULT, "", cause)

    def _try_set(self, key: str, value: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(key, value)

    def _read(self, key: str) -> str:
        return self._store.get(key).decode()

    def _leave_failed(self) -> None:
        self._leave("failed", 3 * self._interval + 2.0)

    def _leave(self, how: str, patience: float) -> None:
        """The first rank may keep the store: it waits until the others have left, and seen what was declared."""
        self._try_set(f"left/{self._rank}", how)
        if self._rank > 0:
            return
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):
            waiting = set(range(1, self._size))
            while waiting and time.monotonic() < deadline:
                waiting = {rank for rank in waiting if not self._store.check([f"left/{rank}"])}
                time.sleep(0.05)


def _whereabouts() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _in_short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _place(frame: FrameType | None) -> dict[str, Any]:
    """Where a thread is: its innermost line outside the code in which processes wait for each other."""
    stack = traceback.extract_stack(frame) if frame is not None else []
    if not stack:
        return {"waits": False, "at": "an unknown place"}
    ours = [entry for entry in stack if not any(part in entry.filename for part in _WAITING)]
    entry = ours[-1] if ours else stack[-1]
    return {
        "waits": any(part in stack[-1].filename for part in _WAITING),
        "at": f"{entry.filename}:{entry.lineno} in {entry.name}",
    }


def _few(items: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(items.items())[:_NAMED]
