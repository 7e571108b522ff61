"""``steptron pretrain``"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from steptron.train.stop import StopRequest


def pretrain(
    file: Annotated[Path, typer.Argument(help="Training configuration (YAML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as train.steps=100.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local processes to start; 1 by default. Not under torchrun or srun.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: delete this run's earlier checkpoints and log.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="With --nproc: how often all processes start again after one has died or failed.")
    ] = 0,
    through: Annotated[
        str | None,
        typer.Option(metavar="STAGE", help="End with this stage, as if it were the run's last."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="STEPS", help="Steps to profile, such as 20, 20-22 or 20-22,100; see docs/profiling.md."),
    ] = None,
    profile_ranks: Annotated[
        str | None,
        typer.Option(metavar="RANKS", help="Ranks that write a profile, such as 0,8 or 0-7; rank 0 by default."),
    ] = None,
) -> None:
    """Pre-train a model.

    With --nproc N, N local processes are started; under torchrun or SLURM the process joins the
    others. The same command continues an interrupted run from its newest whole checkpoint.

    Exit codes: 0 the run is complete; 75 it was asked to stop (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP), wrote a checkpoint
    if it had made a step, and can be continued; 76 another process of the run died or hangs; 2 something has to be
    mended first.
    """
    from steptron.train.stop import StopRequest

    # Before anything that takes time: whoever asks while the run starts is heard.
    with StopRequest() as stop:
        code = _pretrain(stop, file, overrides or [], nproc, fresh, max_restarts, through, profile, profile_ranks)
    raise typer.Exit(code)


def _pretrain(
    stop: StopRequest,
    file: Path,
    overrides: list[str],
    nproc: int | None,
    fresh: bool,
    max_restarts: int,
    through: str | None,
    profile: str | None,
    profile_ranks: str | None,
) -> int:
    """The command, with its arguments; returns the exit code."""
    from steptron.config.checks import check_stages
    from steptron.config.loader import load
    from steptron.errors import UserError
    from steptron.platform import launch
    from steptron.platform.world import attempt, world
    from steptron.profiling.request import parse_request
    from steptron.train.stop import STOPPED_EXIT_CODE

    curriculum = load(file, overrides).through(through)
    config = curriculum.stages[0].config
    if config.parallel.tensor > 1:
        # Kernels then start in the order in which they were queued, so that a gather that should run beside a
        # product is not kept waiting behind it. Read by the CUDA driver when it starts, which the checks may do.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    joined = launch.joined_size(nproc)
    world_size = joined or nproc or 1
    if profile_ranks is not None and profile is None:
        raise UserError("--profile-ranks says which ranks profile; add --profile to say which steps")
    request = None if profile is None else parse_request(profile, profile_ranks, curriculum.steps, world_size)
    check_stages(curriculum, world_size=world_size, check_data=True)
    if joined is not None and max_restarts:
        raise UserError(
            "--max-restarts is for processes that --nproc starts: give it to torchrun (--max-restarts) instead"
        )
    if joined is None and (world_size > 1 or max_restarts):
        run = ["pretrain", str(file), *overrides]
        options: list[str] = []
        for option, value in (("--through", through), ("--profile", profile), ("--profile-ranks", profile_ranks)):
            options += [] if value is None else [option, value]
        return launch.run_local(
            world_size,
            [*run, *(["--fresh"] if fresh else []), *options],
            max_restarts=max_restarts,
            restart_arguments=[*run, *options],  # goes on from what there is by then
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
                complete = train(curriculum, device, stop, fresh and attempt() == 0, request, watch.progress)
    distributed.shutdown()
    # The interpreter's end takes its time, too.
    stop.ignore_further()
    return 0 if complete else STOPPED_EXIT_CODE
