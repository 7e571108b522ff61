"""How many threads a process takes, and what is said when they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from steptron.errors import UserError
from steptron.platform.cores import Cores
from steptron.platform.threads import Threads, decide, default_environment, misfit, set_threads

SIX = Cores(frozenset(range(6)), tuple(frozenset({cpu}) for cpu in range(6)))


def _decide(processes: int, setting: int | None = None, cores: Cores = SIX, **environment: str) -> Threads:
    return decide(setting, cores, [cores.cpus] * processes, environment)


def test_processes_share_the_cores() -> None:
    assert [_decide(processes).count for processes in (1, 2, 4, 6, 16)] == [6, 3, 1, 1, 1]
    assert _decide(2) == Threads(3, "cores", Fraction(3), Fraction(3), 2)


def test_hardware_threads_are_not_cores() -> None:
    smt = Cores(frozenset(range(8)), tuple(frozenset({core, core + 4}) for core in range(4)))
    assert _decide(1, cores=smt).count == 4
    assert misfit(_decide(1, setting=8, cores=smt), {}) is None  # as many as hardware threads: no more than it can run


def test_settings_win_over_the_share() -> None:
    assert _decide(2, OMP_NUM_THREADS="5").count == 5
    assert _decide(2, OMP_NUM_THREADS=" 4,2").count == 4
    assert _decide(2, OMP_NUM_THREADS="").source == "cores"
    chosen = _decide(2, setting=2, OMP_NUM_THREADS="5")
    assert (chosen.count, chosen.source) == (2, "train.threads")


@pytest.mark.parametrize("value", ["0", "-1", "all", "2.5"])
def test_an_unreadable_number_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="OMP_NUM_THREADS is "):
        _decide(1, OMP_NUM_THREADS=value)


def test_more_threads_than_cpus_are_told_with_the_cause() -> None:
    assert misfit(_decide(2, OMP_NUM_THREADS="6"), {}) == (
        "2 processes of 6 threads on 6 usable CPUs: threads wait for each other; OMP_NUM_THREADS=3 suits this machine"
    )
    assert misfit(_decide(1, setting=7), {}) == (
        "1 process of 7 threads on 6 usable CPUs: threads wait for each other; train.threads=6 suits this machine"
    )
    quota = Cores(SIX.cpus, SIX.siblings, 2.5)
    assert "on 2.5 usable CPUs" in str(misfit(_decide(1, setting=3, cores=quota), {}))


def test_more_processes_than_cpus_are_told_neutrally() -> None:
    assert misfit(_decide(8), {}) == "8 processes on 6 usable CPUs: less than one CPU each"


def test_what_fits_is_not_mentioned() -> None:
    for processes, setting in ((1, None), (2, None), (6, None), (4, 1), (2, 3)):
        assert misfit(_decide(processes, setting), {}) is None


def test_torchrun_s_single_thread_wins_and_is_told() -> None:
    torchrun = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    note = misfit(_decide(2, OMP_NUM_THREADS="1"), torchrun)
    assert note is not None and note.endswith("OMP_NUM_THREADS=3 or train.threads=3 suits this machine")
    assert misfit(_decide(6, OMP_NUM_THREADS="1"), torchrun) is None
    assert misfit(_decide(2, setting=1), torchrun) is None
    assert misfit(_decide(2, OMP_NUM_THREADS="1"), {"OMP_NUM_THREADS": "1"}) is None


@pytest.fixture
def _restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_restored")
def test_torch_openmp_and_mkl_agree() -> None:
    set_threads(3)
    report = torch.__config__.parallel_info()
    assert torch.get_num_threads() == 3
    assert "omp_get_max_threads() : 3" in report
    if torch.backends.mkl.is_available():
        assert "mkl_get_max_threads() : 3" in report


def test_variables_that_are_set_are_kept() -> None:
    assert default_environment({}) == {"OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    assert default_environment({"OMP_WAIT_POLICY": "active"}) == {"OPENBLAS_NUM_THREADS": "1"}
    assert default_environment({"OPENBLAS_NUM_THREADS": "4", "GOMP_SPINCOUNT": "5"}) == {}
