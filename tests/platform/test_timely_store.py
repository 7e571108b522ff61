"""A store whose calls end in time, whatever its process does."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from steptron.platform.timely_store import NoAnswerError, TimelyStore


def test_it_answers_as_the_store_does() -> None:
    store = dist.HashStore()
    timely = TimelyStore(lambda: store, 10.0)
    timely.set("a", "1")
    assert timely.get("a") == store.get("a") == b"1"
    assert timely.check(["a"])
    assert not timely.check(["a", "b"])
    assert timely.compare_set("a", "2", "3") == b"1"
    assert timely.compare_set("a", "1", "3") == store.get("a") == b"3"
    assert timely.silence is None


def test_a_call_that_does_not_return_is_given_up_and_every_later_one_at_once() -> None:
    """A HashStore waits for a key that is missing, for five minutes."""
    timely = TimelyStore(dist.HashStore, 0.3)
    started = time.monotonic()
    with pytest.raises(NoAnswerError, match=r"no answer for 0\.3 s"):
        timely.get("missing")
    assert 0.25 < time.monotonic() - started < 3
    started = time.monotonic()
    for call in (lambda: timely.set("a", "1"), lambda: timely.get("a"), lambda: timely.check(["a"])):
        with pytest.raises(NoAnswerError):
            call()
    assert time.monotonic() - started < 0.2
    assert isinstance(timely.silence, NoAnswerError)


def test_of_two_threads_that_wait_the_second_gives_up_with_the_first() -> None:
    timely = TimelyStore(dist.HashStore, 2.0)

    def wait_for_missing() -> None:
        with pytest.raises(NoAnswerError):
            timely.get("missing")

    first = threading.Thread(target=wait_for_missing)
    first.start()
    time.sleep(1.0)
    started = time.monotonic()
    with pytest.raises(NoAnswerError):
        timely.check(["a"])
    assert time.monotonic() - started < 1.6
    first.join()


def test_a_connection_that_is_not_made_is_given_up() -> None:
    def connect() -> dist.Store:
        time.sleep(60)
        raise AssertionError

    with pytest.raises(NoAnswerError):
        TimelyStore(connect, 0.3).set("a", "1")


def test_errors_of_the_store_arrive_and_do_not_end_it() -> None:
    failures = [RuntimeError("connection refused")]

    def connect() -> dist.Store:
        if failures:
            raise failures.pop()
        return dist.HashStore()

    timely = TimelyStore(connect, 10.0)
    with pytest.raises(RuntimeError, match="connection refused"):
        timely.set("a", "1")
    timely.set("a", "2")
    assert timely.get("a") == b"2"
    assert timely.silence is None


def test_closed_it_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    timely = TimelyStore(dist.HashStore, 10.0)
    timely.set("a", "1")
    (thread,) = set(threading.enumerate()) - before
    timely.close()
    thread.join(5.0)
    assert not thread.is_alive()
