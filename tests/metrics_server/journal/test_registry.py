"""What receivers know of a run together, through a file."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from steptron_metrics.journal import registry as registry_of
from steptron_metrics.journal.registry import FILE, Claim, Mark, Registry, TooManySessions
from steptron_metrics.protocol.description import Combination, Limits

SAMPLES, SUM = Combination.SAMPLES, Combination.SUM


def claim(metric: str = "a.b", layer: int = 0, end: int = 8, combination: Combination = SAMPLES) -> Claim:
    return Claim(metric, layer, end, combination)


def taken(registry: Registry, *claims: Claim, session: int = 1) -> str | None:
    (reason,) = registry.claim(session, [claims])
    return reason


def test_a_session_ends_where_a_later_one_begins_whoever_asks(tmp_path: Path) -> None:
    one, other = (Registry(tmp_path / "run", Limits()) for _ in range(2))
    one.mark(10, 5)
    assert one.later(10) is None and one.first(10) == 5
    assert not other.is_current
    other.update()
    assert other.is_current and other.later(9) == one.later(9)
    other.mark(20, 8)
    assert not one.is_current and one.later(10) is None
    one.update()
    later = one.later(10)
    assert later is not None and later[:2] == (20, 8) and one.later(20) is None
    one.mark(20, 7)
    one.mark(20, 9)  # not its least
    one.mark(30, 100)
    other.update()
    assert [other.later(session).first for session in (1, 10, 20)] == [5, 7, 100]
    assert Registry(tmp_path / "run", Limits()).later(10) is None  # nothing is read unasked


def test_too_many_sessions_are_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run", Limits(run_sessions=3))
    for session in (1, 2, 3):
        registry.mark(session, session)
    with pytest.raises(TooManySessions, match="run 'run' has 3 sessions, at most 3"):
        registry.mark(4, 4)
    registry.mark(3, 1)  # one that it has


def test_limits_hold_over_all_descriptions_and_processes(tmp_path: Path) -> None:
    limits = Limits(run_metrics=3, run_series=5, total_items=64)
    one, other = (Registry(tmp_path / "run", limits) for _ in range(2))
    assert taken(one, *(claim("a.b", layer) for layer in range(4))) is None  # 4 x 8 items
    assert taken(other, claim("a.c", end=5)) is None  # counts as 8
    assert "6 series, counted by metric and layer, at most 5" in (taken(one, claim("a.d")) or "")
    assert taken(one, claim("a.b", 0), claim("a.c")) is None  # nothing new
    reason = taken(other, claim("a.b", 0, end=33))
    assert reason is not None and "with it run 'run' would have 96 items" in reason
    assert taken(other, claim("a.b", 0, end=32)) is None  # 24 more: 64
    assert "at most 64" in (taken(one, claim("a.b", 1, end=9)) or "")
    assert taken(Registry(tmp_path / "run", Limits()), claim("a.d"), claim("a.e")) is None
    assert "5 metrics, at most 3" in (taken(one, claim("a.f", 1), claim("a.b")) or "")


def test_of_a_refused_description_nothing_is_kept(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run", Limits(run_series=2))
    before = [registry.claim(1, [[claim("a.a")]]), (tmp_path / "run" / FILE).read_bytes()]
    assert before[0] == [None]
    reasons = registry.claim(1, [[claim("a.b"), claim("a.c")], [claim("a.d")], [claim("a.e")]])
    assert [reason is None for reason in reasons] == [False, True, False]
    added = (tmp_path / "run" / FILE).read_bytes()[len(before[1]) :]
    assert [json.loads(line)[1] for line in added.splitlines()] == ["a.d"]


def test_a_series_is_combined_in_one_way_in_a_session_and_the_first_counts(tmp_path: Path) -> None:
    one, other = (Registry(tmp_path / "run", Limits()) for _ in range(2))
    assert taken(one, claim("a.b"), claim("a.c", combination=SUM), session=5) is None
    reason = taken(other, claim("a.b", combination=SUM), session=5)
    assert reason is not None and "a.b of layer 0: combination SUM, in this session it is SAMPLES already" in reason
    # A later session is another configuration, if it is to be; what is left of the former does not change that.
    assert taken(other, claim("a.b", combination=SUM), session=6) is None
    assert taken(one, claim("a.b"), session=5) is None
    assert taken(one, claim("a.b"), session=6) is not None
    # One that says the same is bound by it, too.
    assert taken(one, claim("a.c", combination=SUM), session=7) is None
    assert taken(other, claim("a.c"), session=7) is not None


def test_what_a_killed_writer_has_left_is_cut_off(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run", Limits())
    registry.mark(1, 1)
    path = tmp_path / "run" / FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'["session",2,')
    reader = Registry(tmp_path / "run", Limits())
    reader.update()
    assert reader.first(1) == 1 and path.read_bytes() == whole
    path.write_bytes(whole + b"rubbish\n[]\n[1,2]\n" + b'["series","a.b"]\n["session",3,4,5]\n')
    registry.update()
    assert registry.later(1) == Mark(3, 4, 5)


def test_a_deleted_run_is_begun_anew(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "run", Limits(run_series=1))
    registry.mark(5, 5)
    assert taken(registry, claim()) is None
    generation = registry.generation
    shutil.rmtree(tmp_path / "run")
    assert not registry.is_current
    assert taken(registry, claim("b.b")) is None
    assert registry.later(1) is None and registry.generation is not generation and registry.is_current


def test_the_file_does_not_grow_without_bound(tmp_path: Path) -> None:
    one = Registry(tmp_path / "run", Limits(), compact_bytes=2000)
    other = Registry(tmp_path / "run", Limits(), compact_bytes=2000)
    for session in range(1, 200):
        writer = one if session % 2 else other
        assert taken(writer, *(claim("a.b", layer) for layer in range(20)), session=session) is None
        writer.mark(1, 1)
        assert (tmp_path / "run" / FILE).stat().st_size < 12_000
    other.update()
    assert other.first(1) == 1 and taken(other, claim("a.b", 3, combination=SUM), session=199) is not None


def test_whoever_does_not_let_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_of, "_LOCK_SECONDS", 0.05)
    registry = Registry(tmp_path / "run", Limits())
    registry.mark(1, 1)
    fd = os.open(tmp_path / "run" / FILE, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"another receiver has not let go of .*registry"):
            registry.mark(2, 2)
    finally:
        os.close(fd)
    registry.mark(2, 2)


def _mark_many(folder: Path, number: int) -> None:
    registry = Registry(folder, Limits(run_series=150))
    for index in range(50):
        registry.mark(1 + number + 4 * index, 1000 - index)
        registry.claim(1, [[claim(f"a.m{number}", index)]])


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_mark_many, args=(tmp_path / "run", number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert sum(line[0] == "session" for line in lines) == 200
    assert sum(line[0] == "series" for line in lines) == 150
