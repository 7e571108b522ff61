"""What signals do to a process that may be asked to stop, up to its very end."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from steptron.train.stop import STOPPED_EXIT_CODE, StopRequest

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ALL = (*ASKING, signal.SIGINT)


def end() -> None:
    """A handler that a test sets and never calls."""
    pytest.fail("the signal went to the handler before")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: end()) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", ALL)
@pytest.mark.parametrize("then", ASKING)
def test_after_the_first_signal_others_change_nothing(first: signal.Signals, then: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(first)
        assert stop.requested
        signal.raise_signal(then)
        signal.raise_signal(then)
    assert stop.received == [first, then, then]


@pytest.mark.parametrize("before", [(), (signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM)])
def test_the_second_ctrl_c_interrupts_whatever_came_before(
    before: tuple[signal.Signals, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        for number in before:
            signal.raise_signal(number)
        assert "Ctrl-C" not in capfd.readouterr().err
        signal.raise_signal(signal.SIGINT)
        assert stop.requested and "Ctrl-C once more ends it at once" in capfd.readouterr().err
        signal.raise_signal(signal.SIGINT)
    # What is left of the process can be interrupted, too.
    assert signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.SIG_DFL)


def test_without_a_request_handlers_are_restored_but_for_those_that_someone_else_has_set() -> None:
    before = {number: signal.getsignal(number) for number in ALL}
    with StopRequest():
        assert all(signal.getsignal(number) != before[number] for number in ALL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the watch does when the process fails
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert all(signal.getsignal(number) == before[number] for number in ALL if number != signal.SIGTERM)


def test_a_hang_up_stays_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert not stop.requested


@pytest.mark.parametrize("ending", ["raise_signal(SIGTERM)", "stop.ignore_further()"])
def test_signals_while_the_interpreter_ends_leave_the_exit_code(ending: str) -> None:
    """After a request, and after a run that has come to its end."""
    code = f"""
import sys
from signal import *
from steptron.train.stop import StopRequest
assert "torch" not in sys.modules, "listening has to begin early"
class Late:
    def __del__(self, raise_signal=raise_signal, numbers={tuple(map(int, ALL))}):  # when modules are torn down
        for number in numbers:
            raise_signal(number)
        print("survived")
late = Late()
with StopRequest() as stop:
    {ending}
sys.exit(75)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (STOPPED_EXIT_CODE, "survived\n"), done.stderr


def test_what_is_printed_after_the_terminal_was_lost_does_no_harm() -> None:
    code = """
import sys, time
from steptron.train.stop import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("to nobody", flush=True)
    print("to nobody", file=sys.stderr, flush=True)
sys.exit(75)
"""
    terminal, inner = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=inner, stderr=inner)
    try:
        os.close(inner)
        with open(terminal, "rb", buffering=0) as screen:  # to the end of the line: the rest of it must not be lost
            assert screen.readline() == b"ready\r\n"
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=60) == STOPPED_EXIT_CODE
    finally:
        process.kill()
