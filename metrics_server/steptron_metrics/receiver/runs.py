"""The runs that connections of a process are of, and their registries."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping

from steptron_metrics import catalogue
from steptron_metrics.journal.registry import Claim, Mark, Registry
from steptron_metrics.protocol.description import Combination, Series
from steptron_metrics.receiver.descriptions import Descriptions, Known
from steptron_metrics.receiver.greeting import Session
from steptron_metrics.settings import Settings

_MANY = 64
"""Sessions; beyond that those without connections are looked for."""


class Run:
    """A run that has connections.

    Args:
        registry: of the run.
        descriptions: those of the process.
    """

    def __init__(self, registry: Registry, descriptions: Descriptions) -> None:
        self._registry = registry
        self._descriptions = descriptions
        self._generation = registry.generation
        self._admitted: dict[int, weakref.WeakSet[Known]] = {}  # by session
        self._writing = asyncio.Lock()

    async def admit(self, session: Session, used: Mapping[int, Known]) -> dict[int, str]:
        """Registers descriptions, and learns what other receivers have registered.

        Args:
            session: that sends them.
            used: by id.

        Returns:
            Why the run does not take those that it does not take.

        Raises:
            OSError: the disk does not take it.
        """
        if self._registry.is_current and not self._new(session, used):
            return {}
        async with self._writing:
            if not self._registry.is_current:
                await asyncio.to_thread(self._registry.update)
            new = self._new(session, used)
            if not new:
                return {}
            reasons = await asyncio.to_thread(self._claim, session, list(new.values()))
            admitted = self._of(session)
            refused = {}
            for (description_id, known), reason in zip(new.items(), reasons, strict=True):
                if reason is None:
                    admitted.add(known)
                    known.series = None
                else:
                    refused[description_id] = reason
            return refused

    def later(self, session: Session) -> Mark | None:
        """The later session from whose first iteration on this one is void."""
        return self._registry.later(session.started_ns)

    async def begin(self, session: Session, first: int) -> None:
        """Makes sure that it is on the disk that a session has this iteration.

        Raises:
            TooManySessions: of this run.
            OSError: the disk does not take it.
        """
        if first < self._registry.first(session.started_ns):
            async with self._writing:
                await asyncio.to_thread(self._registry.mark, session.started_ns, first)

    def _new(self, session: Session, used: Mapping[int, Known]) -> dict[int, Known]:
        admitted = self._of(session)
        return {one: known for one, known in used.items() if known not in admitted}

    def _of(self, session: Session) -> weakref.WeakSet[Known]:
        if self._generation is not self._registry.generation:
            self._generation = self._registry.generation
            self._admitted.clear()
        if len(self._admitted) > _MANY:
            self._admitted = {session_ns: of for session_ns, of in self._admitted.items() if of}
        return self._admitted.setdefault(session.started_ns, weakref.WeakSet())

    def _claim(self, session: Session, several: list[Known]) -> list[str | None]:
        claims = [_claims(self._descriptions.series(known), session.world_size) for known in several]
        return self._registry.claim(session.started_ns, claims)


class Runs:
    """All runs of a process that have connections."""

    def __init__(self, settings: Settings, descriptions: Descriptions) -> None:
        self._settings = settings
        self._descriptions = descriptions
        self._open: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()

    def open(self, name: str) -> Run:
        """A run; it is forgotten when nobody holds it any more."""
        run = self._open.get(name)
        if run is None:
            registry = Registry(self._settings.journal / name, self._settings.limits)
            run = self._open[name] = Run(registry, self._descriptions)
        return run


def _claims(series: tuple[Series, ...], world_size: int) -> list[Claim]:
    found: dict[tuple[str, int], tuple[int, Combination]] = {}
    for one in series:
        metric = catalogue.find(one.metric)
        end = one.first + one.count
        if one.count == 1 and metric is not None and metric.items == "rank":
            end = max(end, world_size)  # the item is the rank that sends it
        key = (one.metric, one.layer)
        found[key] = (max(end, found.get(key, (0, None))[0]), one.combination)
    return [Claim(*key, *what) for key, what in found.items()]
