"""``steptron pretrain``"""

from __future__ import annotations

import typer

from steptron.cli import training


def pretrain(
    file: training.File,
    overrides: training.Overrides = None,
    nproc: training.Nproc = None,
    fresh: training.Fresh = False,
    max_restarts: training.MaxRestarts = 0,
    through: training.Through = None,
    profile: training.Profile = None,
    profile_ranks: training.ProfileRanks = None,
) -> None:
    """Pre-train a model.

    With --nproc N, N local processes are started; under torchrun or SLURM the process joins the
    others. The same command continues an interrupted run from its newest whole checkpoint.

    Exit codes: 0 the run is complete; 75 it was asked to stop (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP), wrote a checkpoint
    if it had made a step, and can be continued; 76 another process of the run died or hangs; 2 something has to be
    mended first.
    """
    given = training.Arguments(file, overrides or [], nproc, fresh, max_restarts, through, profile, profile_ranks)
    raise typer.Exit(training.run(["pretrain"], given))
