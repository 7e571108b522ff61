"""Local launch: environment, exit codes, signals, and workers that fail or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steptron.platform import launch
from tests.worker_pool import REPOSITORY

MODULE = "tests.platform.launched"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers do not look for modules in the current folder: the module of the tests has to be named."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


@contextlib.contextmanager
def _launcher(
    mode: str,
    folder: Path,
    stop_grace: float = 30.0,
    nproc: int = 2,
    failure_grace: float = 1.0,
    hang_up: str = "SIG_DFL",
) -> Iterator[subprocess.Popen[str]]:
    """A launching process of its own, as the command line is one; killed at the end.

    Args:
        hang_up: what it finds that SIGHUP does.
    """
    code = (
        f"import sys; from signal import *; from steptron.platform.launch import run_local; signal(SIGHUP, {hang_up}); "
        f"sys.exit(run_local({nproc}, {[mode, str(folder)]!r}, module={MODULE!r}, max_restarts=3, "
        f"stop_grace_seconds={stop_grace}, failure_grace_seconds={failure_grace}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in range(nproc)))
        yield process
    finally:
        process.kill()
        process.wait()
        for rank in range(nproc):
            assert not _alive(int((folder / f"pid-{rank}").read_text())), f"rank {rank} was left behind"


def _wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not. Gives it a moment to end."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


def _end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_workers_get_torchruns_environment_and_rank_0_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch.run_local(3, ["environment", str(tmp_path)], module=MODULE) == 0
    lines = [(tmp_path / f"environment-{rank}").read_text().split() for rank in range(3)]
    port = lines[0][-1]
    assert int(port) > 1023
    assert lines == [[str(rank), "3", str(rank), "3", "127.0.0.1", port] for rank in range(3)]
    output, errors = capfd.readouterr()
    assert output == "output of rank 0\n"
    assert errors == ""


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [("fail", 3, ["ended with exit code 3", "the reason"]), ("die", 128 + signal.SIGSEGV, ["ended by SIGSEGV"])],
)
def test_a_worker_that_fails_is_named_and_ends_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, code: int, words: list[str]
) -> None:
    start = time.monotonic()
    assert launch.run_local(2, [mode, str(tmp_path)], module=MODULE) == code
    assert time.monotonic() - start < 10
    errors = capfd.readouterr().err
    assert "rank 1 of 2" in errors
    for word in words:
        assert word in errors, errors
    assert (tmp_path / "saved-0").exists(), "rank 0 was asked to end, not killed"


def test_others_that_hang_after_a_failure_are_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run_local(2, ["wait", str(tmp_path)], module=MODULE, failure_grace_seconds=1.0) == 3
    errors = capfd.readouterr().err
    assert "rank 1 of 2 ended with exit code 3" in errors
    assert "killing rank(s) 0: still running 1 s after" in errors


def test_a_request_to_stop_after_a_failure_is_no_start_again(tmp_path: Path) -> None:
    with _launcher("hang", tmp_path, failure_grace=2.0) as process:
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        code, errors = _end(process)
    assert code == os.EX_TEMPFAIL
    assert "rank 1 of 2 was ended by SIGKILL" in errors
    assert "killing rank(s) 0: still running 2 s after" in errors
    assert "stopped as asked instead of starting again" in errors


@pytest.mark.parametrize("names", ["USR1 TERM", "TERM USR1", "USR1 INT", "USR1 USR1", "HUP TERM", "INT TERM HUP USR1"])
def test_workers_are_asked_to_stop_once_whatever_follows(tmp_path: Path, names: str) -> None:
    """As SLURM does it: a warning, then SIGTERM."""
    numbers = [signal.Signals[f"SIG{name}"] for name in names.split()]
    with _launcher("work", tmp_path) as process:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.1)
        code, errors = _end(process)
    assert code == os.EX_TEMPFAIL, errors
    for rank in range(2):
        assert (tmp_path / f"saved-{rank}").read_text() == "asked 1 times"
    first, *others = errors.splitlines()
    assert f"{numbers[0].name}: asked 2 processes to stop; they have 30 s to end" in first
    said = [first] if numbers[0] == signal.SIGINT else others if signal.SIGINT in numbers else []
    assert ["Ctrl-C once more kills them" in line for line in said] == [True] * len(said)
    assert "exit code" not in errors


def test_workers_that_hang_after_a_request_to_stop_are_killed(tmp_path: Path) -> None:
    with _launcher("hang", tmp_path, stop_grace=0.5) as process:
        process.send_signal(signal.SIGTERM)
        code, errors = _end(process)
    assert code == 128 + signal.SIGKILL
    assert "killing rank(s) 0, 1: still running 0.5 s after they were asked to end" in errors


@pytest.mark.parametrize("before", [None, signal.SIGTERM])
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, before: signal.Signals | None) -> None:
    with _launcher("hang", tmp_path) as process:
        assert process.stderr is not None
        if before is not None:
            process.send_signal(before)
            assert "Ctrl-C" not in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert "Ctrl-C once more kills them" in process.stderr.readline()
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        code, errors = _end(process)
    assert time.monotonic() - start < 5
    assert code == 128 + signal.SIGKILL
    assert "second Ctrl-C" in errors


@pytest.mark.parametrize("asked", ["launcher", "worker"])
def test_a_worker_that_was_not_ready_for_the_request_has_stopped_as_asked(tmp_path: Path, asked: str) -> None:
    """The other one would wait for it in vain."""
    with _launcher("late", tmp_path) as process:
        os.kill(process.pid if asked == "launcher" else int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
        code, errors = _end(process)
    assert code == os.EX_TEMPFAIL, errors
    assert "killing rank(s) 0, which cannot go on without rank(s) 1" in errors
    assert "stopped as asked; rank(s) 1 ended at once" in errors
    assert "again" not in errors


def test_a_request_before_the_workers_start_is_kept_and_later_ones_do_not_matter(tmp_path: Path) -> None:
    code = (
        "import sys; from signal import *; from steptron.platform.launch import run_local; "
        f"code = run_local(2, ['work', {str(tmp_path)!r}], module={MODULE!r}, received=[SIGUSR1]); "
        "[raise_signal(number) for number in (SIGTERM, SIGUSR1, SIGHUP, SIGINT)]; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == os.EX_TEMPFAIL
    assert done.stderr == "steptron: stopped as asked before it began; the same command starts it\n"
    assert list(tmp_path.iterdir()) == []


def test_a_hang_up_stays_ignored_under_nohup(tmp_path: Path) -> None:
    with _launcher("work", tmp_path, hang_up="SIG_IGN") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        code, errors = _end(process)
    assert code == os.EX_TEMPFAIL
    assert errors.startswith("steptron: SIGTERM: asked 2 processes")


def test_ctrl_c_of_the_terminal_does_not_reach_the_workers(tmp_path: Path) -> None:
    with _launcher("work", tmp_path) as process:
        sessions = {os.getsid(int((tmp_path / f"pid-{rank}").read_text())) for rank in range(2)}
        assert len(sessions) == 2 and os.getsid(process.pid) not in sessions


def test_a_killed_launcher_takes_its_workers_along(tmp_path: Path) -> None:
    with _launcher("work", tmp_path) as process:
        process.kill()
        _wait_for(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in range(2)))


def test_a_launcher_that_is_killed_during_a_stop_does_not_cut_it_short(tmp_path: Path) -> None:
    with _launcher("work", tmp_path) as process:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        process.kill()
        _wait_for(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in range(2)))


def test_handlers_are_restored_and_logs_removed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    workers = launch.Workers(2, ["environment", str(tmp_path)], MODULE, capture=True)
    _wait_for(lambda: bool(workers.poll()) or not workers.running)
    _wait_for(lambda: not workers.running or not workers.poll())
    workers.kill()
    workers.remove_logs()
    assert not workers.folder.exists()
    launch.run_local(1, ["environment", str(tmp_path)], module=MODULE)
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_launches_at_once_do_not_share_a_port(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    both = [launch.Workers(1, ["environment", str(folder)], MODULE, capture=True) for folder in folders]
    try:
        for workers in both:
            _wait_for(lambda workers=workers: not workers.running or bool(workers.poll()))  # type: ignore[misc]
    finally:
        for workers in both:
            workers.kill()
            workers.remove_logs()
    ports = {(folder / "environment-0").read_text().split()[-1] for folder in folders}
    assert len(ports) == 2
    for port in ports:  # and both are free again
        socket.create_server(("127.0.0.1", int(port))).close()


def test_a_folder_named_like_the_package_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the parent of a clone, where `steptron/` holds no package but the project."""
    (tmp_path / "steptron").mkdir()
    monkeypatch.chdir(tmp_path)
    assert launch.run_local(2, ["--help"]) == 0
    subprocess.run([sys.executable, "-m", "steptron", "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_after_a_failure_all_start_again_with_their_second_arguments(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, then = (["once", str(tmp_path)], ["again", str(tmp_path)])
    assert launch.run_local(2, first, module=MODULE, max_restarts=3, restart_arguments=then) == 0
    assert {file.name for file in tmp_path.glob("*-[01]") if not file.name.startswith("pid")} == {
        "once-0",
        "once-1",
        "again-0",
        "again-1",
    }
    assert capfd.readouterr().err.count("starting all 2 processes again") == 1


def test_restarts_are_limited(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run_local(2, ["once", str(tmp_path)], module=MODULE, max_restarts=1) == 1
    assert "restart 1 of 1" in capfd.readouterr().err


def test_what_the_user_has_to_mend_is_not_tried_again(tmp_path: Path) -> None:
    assert launch.run_local(1, ["mend", str(tmp_path)], module=MODULE, max_restarts=3) == 2
    assert (tmp_path / "starts").read_text() == "x"
