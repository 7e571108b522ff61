"""When checkpoints are written, and what happens when one cannot be."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from steptron.checkpoint import saving
from steptron.checkpoint.folder import checkpoint_folder, list_checkpoints, partial_folders
from steptron.checkpoint.manifest import Progress, read_manifest
from steptron.config.stages import Stage
from steptron.errors import UserError
from steptron.parallel.mesh import build_mesh
from steptron.train.checkpointing import Checkpointing
from steptron.train.step import TrainStep
from tests.checkpoint.states import configuration, stored
from tests.parallel.layouts import make_batches
from tests.worker_pool import WorkerPool


class Run:
    """A model in training whose checkpoints are written as a run writes them; ``said`` is what it says."""

    def __init__(self, output: Path, *overrides: str) -> None:
        config = configuration(output, overrides)
        mesh = build_mesh(config.parallel)
        self.train = TrainStep(config, mesh, torch.device("cpu"))
        self.output = output
        self.said: list[str] = []
        self.checkpointing = Checkpointing(Stage(config), ["hash"], self.train, self.said.append)
        self._batches = make_batches()[mesh.data_rank :: mesh.data_size]

    def step(self) -> None:
        self.train.run(self._batches, 1e-2, 1e-3)

    def save(self, step: int, last: bool = False) -> None:
        self.checkpointing.save(Progress(step, 8 * step, 100 * step), None, clips=True, last=last)

    @property
    def complete(self) -> list[int]:
        return [int(path.name.removeprefix("step_")) for path in list_checkpoints(self.output)]


@contextlib.contextmanager
def slow_writer() -> Iterator[Callable[[], None]]:
    """Writers wait until what is given is called."""
    go_on, write = threading.Event(), saving.write_tensor_file

    def wait_and_write(*args: Any) -> list[Any]:
        assert go_on.wait(100)
        return write(*args)

    with mock.patch.object(saving, "write_tensor_file", wait_and_write):
        yield go_on.set
        go_on.set()


@contextlib.contextmanager
def full_disk(bad_rank: int) -> Iterator[None]:
    """Writers of a rank find no space; those of others write."""
    write, rank = saving.write_tensor_file, torch.distributed.get_rank()

    def fail(*args: Any) -> list[Any]:
        if rank == bad_rank:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    with mock.patch.object(saving, "write_tensor_file", fail):
        yield


# ------------------------------------------------------------------------------- in the background


def write_while_training(rank: int, world_size: int, folder: Path, overrides: Sequence[str]) -> tuple[list[int], bool]:
    """The checkpoints before the writers could write, and whether parameters had changed by then."""
    run = Run(folder / "background", "train.checkpoint.asynchronous=true", *overrides)
    run.step()
    saving.save(
        configuration(folder / "waited_for", overrides),
        Progress(1, 8, 100),
        ["hash"],
        run.train.chunks,
        run.train.optimizer,
        run.train.mesh,
    )
    before = {name: tensor.detach().clone() for name, tensor in run.train.chunks.logical_tensors()}
    with slow_writer() as go_on:
        run.save(1)
        for _ in range(2):
            run.step()
        assert not run.checkpointing.is_written
        changed = all(not torch.equal(before[name], tensor) for name, tensor in run.train.chunks.named_parameters())
        for states in run.train.optimizer.state().values():
            for state in states:
                state.tensor.fill_(-1.0)  # nor is any state of the optimizer read from now on
        complete = run.complete
        go_on()
        run.checkpointing.conclude()
    assert run.complete == [1] and not run.said
    return complete, changed


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.expert=2", "train.precision=bf16"],
        ["optimizer.name=muon", "optimizer.sharding.reduction=reduce_scatter"],
        ["parallel.pipeline=2"],
    ],
    ids=["EP2 bf16", "DP2 Muon", "PP2"],
)
def test_training_goes_on_and_the_checkpoint_holds_what_was(
    pool: WorkerPool, tmp_path: Path, overrides: list[str]
) -> None:
    for complete, changed in pool.run(2, write_while_training, tmp_path, overrides):
        assert complete == [] and changed
    background, waited_for = (stored(checkpoint_folder(tmp_path / name, 1)) for name in ("background", "waited_for"))
    assert background.keys() == waited_for.keys() and len(background) > 200
    assert [name for name in background if not torch.equal(background[name], waited_for[name])] == []
    assert any(name.startswith("optimizer.") for name in background)


def two_saves(rank: int, world_size: int, output: Path) -> list[list[int]]:
    run = Run(output, "train.checkpoint.asynchronous=true", "train.checkpoint.keep=2")
    seen = []
    for step in (2, 4, 6):
        run.save(step)
        seen.append(run.complete)
    run.checkpointing.conclude()
    run.checkpointing.conclude()  # nothing is left to conclude
    return [*seen, run.complete]


def test_a_save_is_concluded_before_the_next_one_starts(pool: WorkerPool, tmp_path: Path) -> None:
    """And what is no longer kept is deleted when the next one is complete."""
    ((*seen, end),) = pool.run(1, two_saves, tmp_path)
    assert seen == [[], [2], [2, 4]]
    assert end == [4, 6]


def one_save(rank: int, world_size: int, output: Path, asynchronous: bool, last: bool) -> list[int]:
    run = Run(output, f"train.checkpoint.asynchronous={asynchronous}")
    run.save(1, last)
    return run.complete


@pytest.mark.parametrize("asynchronous, last", [(True, True), (False, False)])
def test_the_last_checkpoint_is_waited_for_and_so_is_each_where_that_is_asked_for(
    pool: WorkerPool, tmp_path: Path, asynchronous: bool, last: bool
) -> None:
    assert pool.run(1, one_save, tmp_path, asynchronous, last) == [[1]]


# ---------------------------------------------------------------------------------------- failures


def message_of(action: Callable[[], None]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def unwritable_folder(rank: int, world_size: int, output: Path) -> tuple[list[str], list[str], list[int]]:
    """What is raised by, and said of, saves of which two fail, then three in a row; the checkpoints at the end."""
    run = Run(output, "train.checkpoint.asynchronous=false", "train.checkpoint.tolerated_failures=2")
    raised, folder = [], output / "checkpoints"
    for step, writable in enumerate([False, False, True, False, False, False, True], start=1):
        torch.distributed.barrier()
        if rank == 0:
            if writable and folder.is_file():
                folder.unlink()
                folder.with_name("aside").exists() and folder.with_name("aside").rename(folder)
            elif not writable and not folder.is_file():
                folder.exists() and folder.rename(folder.with_name("aside"))
                folder.touch()  # a file where the folder should be
        torch.distributed.barrier()
        raised.append(message_of(lambda step=step: run.save(step)))  # type: ignore[misc]
    return raised, run.said, run.complete


def test_failures_are_tolerated_up_to_a_number_in_a_row(pool: WorkerPool, tmp_path: Path) -> None:
    (raised, said, complete), (others_raised, *_) = pool.run(2, unwritable_folder, tmp_path)
    assert others_raised == raised
    assert [bool(message) for message in raised] == [False] * 5 + [True, False]
    assert complete == [3, 7]
    assert [message.splitlines()[-1] for message in said] == 2 * [
        "  training goes on without it; after 2 more such failures in a row the run stops",
        "  training goes on without it; the next such failure stops the run",
    ]
    assert all("checkpoint not written" in message and str(tmp_path) in message for message in [*said, raised[5]])


def failing_writer(rank: int, world_size: int, output: Path) -> tuple[list[str], list[str], list[Path], list[int]]:
    run = Run(output, "train.checkpoint.asynchronous=true", "train.checkpoint.tolerated_failures=1")
    raised = []
    run.save(1)
    run.checkpointing.conclude()
    with full_disk(bad_rank=1):
        run.save(2)
        raised.append(message_of(run.checkpointing.conclude))
    leftovers = partial_folders(output / "checkpoints")
    run.save(3)
    raised.append(message_of(run.checkpointing.conclude))
    with full_disk(bad_rank=1):
        raised.append(message_of(lambda: run.save(4, last=True)))
    return raised, run.said, leftovers, run.complete


def test_a_full_disk_in_the_background_is_noticed_at_the_end_and_the_last_checkpoint_may_not_fail(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (raised, said, leftovers, complete), (others_raised, *_) = pool.run(2, failing_writer, tmp_path)
    assert raised == others_raised and raised[:2] == ["", ""]
    assert "rank 1: " in raised[2] and "No space left on device" in raised[2]
    (message,) = said
    assert "rank 1: " in message and "No space left on device" in message and "the next such failure" in message
    assert leftovers == []
    assert complete == [1, 3]


def lost_folder(rank: int, world_size: int, output: Path) -> tuple[list[str], list[str], list[int]]:
    """Somebody deletes the folder of all checkpoints: before a save, when its plan is made, and when all is written."""
    run = Run(output, "train.checkpoint.asynchronous=true", "train.checkpoint.tolerated_failures=2")
    raised, folder = [], output / "checkpoints"

    def lose() -> None:
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        torch.distributed.barrier()

    run.save(1)
    run.checkpointing.conclude()
    lose()
    run.save(2)  # makes it anew
    raised.append(message_of(run.checkpointing.conclude))
    plan = saving.Planner.plan

    def plan_and_lose(*args: Any) -> Any:
        lose()
        return plan(*args)

    with mock.patch.object(saving.Planner, "plan", plan_and_lose):
        run.save(3)
    raised.append(message_of(run.checkpointing.conclude))
    run.save(4)
    while not run.checkpointing.is_written:
        time.sleep(0.01)
    lose()
    raised.append(message_of(run.checkpointing.conclude))
    run.save(5, last=True)
    return raised, run.said, run.complete


def test_a_lost_folder_ends_no_run_and_leaves_no_process_waiting(pool: WorkerPool, tmp_path: Path) -> None:
    (raised, said, complete), (others_raised, _, others_complete) = pool.run(2, lost_folder, tmp_path)
    assert raised == others_raised == ["", "", ""]
    assert complete == others_complete == [5]
    assert len(said) == 2, said
    assert all("checkpoint not written" in text and "No such file" in text for text in said)


def no_tolerance(rank: int, world_size: int, output: Path) -> tuple[str, list[str]]:
    run = Run(output, "train.checkpoint.asynchronous=false", "train.checkpoint.tolerated_failures=0")
    with full_disk(bad_rank=0):
        return message_of(lambda: run.save(1)), run.said


def test_without_tolerance_the_first_failure_stops(pool: WorkerPool, tmp_path: Path) -> None:
    ((message, said),) = pool.run(1, no_tolerance, tmp_path)
    assert "No space left on device" in message and said == []


def not_finite(rank: int, world_size: int, output: Path) -> tuple[str, list[int]]:
    run = Run(output, "train.checkpoint.asynchronous=false")
    run.save(1)
    if rank == 1:
        dict(run.train.chunks.named_parameters())["final_norm.weight"].data[3] = torch.inf
    return message_of(lambda: run.save(2)), run.complete


def test_parameters_that_are_not_finite_are_not_written(pool: WorkerPool, tmp_path: Path) -> None:
    for message, complete in pool.run(2, not_finite, tmp_path):
        assert message.startswith("after step 2 these parameters are no longer finite: final_norm.weight. ")
        assert complete == [1]


def test_the_manifest_has_the_validation_loss_where_it_is_known(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, validated, tmp_path)
    losses = [read_manifest(folder).validation_loss for folder in list_checkpoints(tmp_path)]
    assert losses == [2.5, None]


def validated(rank: int, world_size: int, output: Path) -> None:
    run = Run(output)
    for step, loss in ((1, 2.5), (2, None)):
        run.checkpointing.save(Progress(step, 8, 100), loss, clips=False, last=True)
