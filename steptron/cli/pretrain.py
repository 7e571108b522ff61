"""``steptron pretrain``"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def pretrain(
    file: Annotated[Path, typer.Argument(help="Training configuration (YAML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as train.steps=100.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local processes to start; 1 by default. Not under torchrun or srun.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over: delete this run's earlier checkpoints and log.")
    ] = False,
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
    others. The same command continues an interrupted run from its newest checkpoint. Exit code 75
    says that the run was asked to stop (Ctrl-C, SIGTERM), wrote a checkpoint and can be continued.
    """
    from steptron.config.checks import check
    from steptron.config.loader import load
    from steptron.errors import UserError
    from steptron.platform import distributed, launch
    from steptron.profiling.request import parse_request

    config = load(file, overrides or []).config
    if config.parallel.tensor > 1:
        # Kernels then start in the order in which they were queued, so that a gather that should run beside a
        # product is not kept waiting behind it. Read by the CUDA driver when it starts, which the checks may do.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    joined = launch.joined_size(nproc)
    world_size = joined or nproc or 1
    if profile_ranks is not None and profile is None:
        raise UserError("--profile-ranks says which ranks profile; add --profile to say which steps")
    request = None if profile is None else parse_request(profile, profile_ranks, config.train.steps, world_size)
    check(config, world_size=world_size, check_data=True)
    if joined is None and world_size > 1:
        arguments = ["pretrain", str(file), *(overrides or []), *(["--fresh"] if fresh else [])]
        for option, value in (("--profile", profile), ("--profile-ranks", profile_ranks)):
            arguments += [] if value is None else [option, value]
        raise typer.Exit(launch.run_local(world_size, arguments))

    device = distributed.start(config.train.device, config.train.threads, config.parallel.timeout_seconds)

    from steptron.train.loop import Pretraining
    from steptron.train.stop import STOPPED_EXIT_CODE

    complete = Pretraining(config, device, fresh, request).run()
    distributed.shutdown()
    if not complete:
        raise typer.Exit(STOPPED_EXIT_CODE)
