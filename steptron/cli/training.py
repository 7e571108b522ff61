"""What the commands that train have in common: their options, and how a run starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from steptron.config.stages import Curriculum
    from steptron.train.stop import StopRequest

File = Annotated[Path, typer.Argument(help="Training configuration (YAML).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as train.seed=1.")]
Nproc = Annotated[
    int | None, typer.Option(min=1, help="Local processes to start; 1 by default. Not under torchrun or srun.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over: delete this run's earlier checkpoints and log.")]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="With --nproc: how often all processes start again after one has died or failed.")
]
Through = Annotated[
    str | None, typer.Option(metavar="STAGE", help="End with this stage, as if it were the run's last.")
]
Profile = Annotated[
    str | None,
    typer.Option(metavar="STEPS", help="Steps to profile, such as 20, 20-22 or 20-22,100; see docs/profiling.md."),
]
ProfileRanks = Annotated[
    str | None,
    typer.Option(metavar="RANKS", help="Ranks that write a profile, such as 0,8 or 0-7; rank 0 by default."),
]


@dataclass(frozen=True)
class Arguments:
    """The command line of a command that trains."""

    file: Path
    overrides: list[str]
    nproc: int | None
    fresh: bool
    max_restarts: int
    through: str | None
    profile: str | None
    profile_ranks: str | None


def run(command: list[str], arguments: Arguments, check_data: Callable[[Curriculum], None] | None = None) -> int:
    """Trains as a command was asked to.

    Args:
        command: its name, as processes are started with it.
        arguments: its arguments.
        check_data: refuses data that the command is not for, with a UserError.

    Returns:
        The exit code.
    """
    from steptron.train.stop import StopRequest

    # Before anything that takes time: whoever asks while the run starts is heard.
    with StopRequest() as stop:
        return _run(stop, command, arguments, check_data)


def _run(
    stop: StopRequest, command: list[str], given: Arguments, check_data: Callable[[Curriculum], None] | None
) -> int:
    from steptron.config.checks import check_stages
    from steptron.config.loader import load
    from steptron.errors import UserError
    from steptron.platform import launch
    from steptron.platform.world import attempt, world
    from steptron.profiling.request import parse_request
    from steptron.train.stop import STOPPED_EXIT_CODE

    curriculum = load(given.file, given.overrides).through(given.through)
    config = curriculum.stages[0].config
    if config.parallel.tensor > 1:
        # Kernels then start in the order in which they were queued, so that a gather that should run beside a
        # product is not kept waiting behind it. Read by the CUDA driver when it starts, which the checks may do.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    joined = launch.joined_size(given.nproc)
    world_size = joined or given.nproc or 1
    if given.profile_ranks is not None and given.profile is None:
        raise UserError("--profile-ranks says which ranks profile; add --profile to say which steps")
    request = (
        None
        if given.profile is None
        else parse_request(given.profile, given.profile_ranks, curriculum.steps, world_size)
    )
    check_stages(curriculum, world_size=world_size, check_data=True)
    if check_data is not None:
        check_data(curriculum)
    if joined is not None and given.max_restarts:
        raise UserError(
            "--max-restarts is for processes that --nproc starts: give it to torchrun (--max-restarts) instead"
        )
    if joined is None and (world_size > 1 or given.max_restarts):
        line = [*command, str(given.file), *given.overrides]
        options: list[str] = []
        for option, value in (
            ("--through", given.through),
            ("--profile", given.profile),
            ("--profile-ranks", given.profile_ranks),
        ):
            options += [] if value is None else [option, value]
        return launch.run_local(
            world_size,
            [*line, *(["--fresh"] if given.fresh else []), *options],
            max_restarts=given.max_restarts,
            restart_arguments=[*line, *options],  # goes on from what there is by then
            received=stop.received,
            on_stop="end, with a checkpoint if training has begun",
        )
    place = world()
    # Alone, there is nobody to agree with.
    if place.size == 1 and stop.requested:
        typer.echo(launch.STOPPED_BEFORE_IT_BEGAN)
        return STOPPED_EXIT_CODE

    from steptron.platform import distributed

    timeout, faults = config.parallel.timeout_seconds, config.train.faults
    device, store = distributed.start(config.train.device, config.train.threads, timeout)

    from steptron.platform.watch import Watch
    from steptron.train.loop import pretrain as train
    from steptron.train.run_lock import run_lock_of_all

    hang_after = faults.hang_after_seconds or 0.8 * timeout
    with Watch(store, place.rank, place.size, faults.dead_after_seconds, hang_after, config.train.output) as watch:
        # Before the model is built and loaded, which may take longer than there is time.
        if stop.requested_anywhere():
            complete = False
            if place.rank == 0:
                typer.echo(launch.STOPPED_BEFORE_IT_BEGAN)
        else:
            with run_lock_of_all(config.train.output):
                # What torchrun starts again goes on from what there is by now.
                complete = train(curriculum, device, stop, given.fresh and attempt() == 0, request, watch.progress)
    distributed.shutdown()
    # The interpreter's end takes its time, too.
    stop.ignore_further()
    return 0 if complete else STOPPED_EXIT_CODE
