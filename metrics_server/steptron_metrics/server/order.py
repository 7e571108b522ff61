"""Puts results back into the order in which their jobs were given out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from steptron_metrics.results import Iteration

Key = tuple[str, int, int]
"""Run, session and iteration."""


@dataclass
class _Place:
    key: Key
    done: bool = False
    forgotten: bool = False
    result: Iteration | None = None


class Order:
    """For each run, results in the order of its jobs: rules judge iterations one after the other."""

    def __init__(self) -> None:
        self._runs: dict[str, deque[_Place]] = {}

    def submitted(self, key: Key) -> None:
        self._runs.setdefault(key[0], deque()).append(_Place(key))

    def finished(self, key: Key, result: Iteration | None) -> bool:
        """Takes a result, None where there will be none; whether anybody is interested in it."""
        for place in self._runs.get(key[0], ()):
            if place.key == key and not place.done:
                place.done, place.result = True, None if place.forgotten else result
                return not place.forgotten
        return False

    def forget(self, run: str) -> None:
        """The run was deleted: results of its jobs that are still to come are not those of a new run of that name."""
        for place in self._runs.get(run, ()):
            place.forgotten, place.result = True, None

    def held(self) -> list[Iteration]:
        """Results that wait for those of earlier jobs."""
        places = [place for of_run in list(self._runs.values()) for place in list(of_run)]
        return [place.result for place in places if place.result is not None]

    def ready(self) -> list[Iteration]:
        """Takes out what no earlier job of the same run is missing before."""
        taken = []
        for run in list(self._runs):
            places = self._runs[run]
            while places and places[0].done:
                result = places.popleft().result
                if result is not None:
                    taken.append(result)
            if not places:
                del self._runs[run]
        return taken
