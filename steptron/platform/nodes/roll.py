"""Check-ins of all processes at the store where they met: who came, and what each has to say.

This works where collectives do not, and it names who is missing.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from steptron.platform.nodes.peers import Peer, Place, name_ranks, peers_of, spans

# Stores differ in what they raise after a timeout; all of it is a RuntimeError.


class AbsentError(Exception):
    """Processes did not come to a step in time; the message names them."""


class Roll:
    """The processes of this run.

    Every process calls the same methods in the same order. Rank 0 reads what all say; it alone looks for
    those who are missing, so that thousands of processes do not each ask the store about thousands.

    Args:
        store: the run's store, which rank 0 (or its launcher) serves.
        rank, size: of this process.
        place: where this process is.
        timeout: longest wait for the others, seconds.

    Raises:
        AbsentError: processes are missing.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, place: Place, timeout: float) -> None:
        self.store = dist.PrefixStore("doctor", store)
        self.rank, self.size = rank, size
        self.timeout = timeout
        self.peers: tuple[Peer, ...] = ()
        places = self.collect("start", asdict(place))
        said = self.tell("places", None if places is None else _packed([Place(**place) for place in places]))
        self.peers = peers_of(_unpacked(said))

    @property
    def own(self) -> Peer:
        """This process."""
        return self.peers[self.rank]

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    def collect(self, step: str, value: object, patience: float = 1.0) -> list[Any] | None:
        """Waits for all processes; rank 0 gets what each said.

        Args:
            step: name of the check-in, used once.
            value: what this process says; anything that JSON holds.
            patience: factor on the timeout, above 1 where others may first run into one of their own.

        Returns:
            By rank, on rank 0; None elsewhere.

        Raises:
            AbsentError: processes did not come in time.
        """
        self.store.set(f"{step}/{self.rank}", json.dumps(value))
        # One key for all: waiting for each process's own would cost size^2 registrations.
        if self.store.add(f"{step}/count", 1) == self.size:
            self.store.set(f"{step}/complete", "")
        seconds = self.timeout * patience
        try:
            self.store.wait([f"{step}/complete"], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise AbsentError(self._who_is_missing(step, seconds)) from error
        if not self.is_first:
            return None
        return [json.loads(self.store.get(f"{step}/{rank}")) for rank in range(self.size)]

    def tell(self, step: str, value: object = None) -> Any:
        """Rank 0's value, on every process.

        Raises:
            AbsentError: rank 0 did not come in time.
        """
        key = f"{step}/told"
        if self.is_first:
            self.store.set(key, json.dumps(value))
            return value
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
            return json.loads(self.store.get(key))
        except RuntimeError as error:
            raise AbsentError(f"{self._named([0])} went away before '{step}'") from error

    def leave(self) -> None:
        """The last call. Rank 0 serves the store, so it waits for the others (no longer than the timeout)."""
        if self.store.add("left", 1) == self.size:
            self.store.set("all left", "")
        if self.is_first:
            try:
                self.store.wait(["all left"], timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise AbsentError(f"'leave' was not reached by all within {self.timeout:g} s") from error

    def _who_is_missing(self, step: str, seconds: float) -> str:
        within = f"within {seconds:g} s"
        try:
            if self.is_first:
                return f"{self._named(self._absent(step, range(self.size)))} did not come to '{step}' {within}"
            if not self.store.check([f"{step}/0"]):
                return f"{self._named([0])} did not come to '{step}' {within}"
        except RuntimeError:
            return f"{self._named([0])} went away while {self._named([self.rank])} waited at '{step}'"
        return f"not all processes came to '{step}' {within}; rank 0 names them"

    def _absent(self, step: str, ranks: range) -> list[int]:
        """Those of some ranks who have not checked in, found by halving."""
        if self.store.check([f"{step}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self._absent(step, ranks[:middle]) + self._absent(step, ranks[middle:])

    def _named(self, ranks: list[int]) -> str:
        if self.peers:
            return name_ranks(ranks, self.peers)
        return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def _packed(places: list[Place]) -> dict[str, Any]:
    """Thousands of processes read this: each host's name once."""
    hosts = list(dict.fromkeys(place.host for place in places))
    numbers = {host: number for number, host in enumerate(hosts)}
    return {
        "hosts": hosts,
        "places": [[numbers[place.host], place.number, place.local_rank] for place in places],
    }


def _unpacked(said: dict[str, Any]) -> list[Place]:
    return [Place(said["hosts"][host], number, local_rank) for host, number, local_rank in said["places"]]
