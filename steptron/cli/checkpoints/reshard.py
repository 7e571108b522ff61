"""``steptron checkpoint reshard``: a checkpoint as another layout would have written it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steptron.cli.transfers import Nproc, run_workers, starts_workers, transfer


def reshard(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or a run's folder (its newest checkpoint).")],
    output: Annotated[Path, typer.Argument(help="Checkpoint folder to write.", metavar="OUT")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Of parallel.* and optimizer.sharding.*: the new layout.", metavar="[a.b=c]..."),
    ] = None,
    nproc: Nproc = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Rewrite a checkpoint as the --nproc processes of another layout would have written it, bit for bit.

    Every layout reads every checkpoint; under its own, each process reads files of its own. All processes together
    hold parameters and optimizer state in memory. The checkpoint is verified first. The states of random generators
    belong to processes: they are kept where their number stays the same, and left out where it changes, as in a run
    that goes on with another number. The training data need not be there.
    """
    from steptron.checkpoint.folder import resolve
    from steptron.checkpoint.manifest import read_manifest
    from steptron.checkpoint.relayout import check_target, relayout
    from steptron.platform import launch

    source, given = resolve(checkpoint), overrides or []
    size = launch.joined_size(nproc) or nproc or 1
    config = relayout(source, given, size)
    progress = read_manifest(source).progress
    assert progress is not None
    check_target(output, source, progress.step, force)
    if starts_workers(nproc):
        run_workers(nproc, ["reshard", str(source), str(output), *given, *(["--force"] if force else [])])
    with transfer("verify", output, config.parallel.timeout_seconds) as (report, conclude):
        import torch.distributed as dist

        from steptron.checkpoint.released.processes import Transfer
        from steptron.checkpoint.reshard import reshard as rewrite

        def say(text: str) -> None:
            if dist.get_rank() == 0:
                typer.echo(text)

        done = rewrite(source, output, config, force=force, report=report, say=say)
        if not done.keeps_random_states:
            say("states of random generators left out: they belong to another number of processes")
        following = [f"steptron checkpoint inspect {output}"]
        if output.parent.name == "checkpoints":
            run = " ".join([f"train.output={output.parent.parent}", *given, *([f"--nproc {size}"] if size > 1 else [])])
            following.append(f"steptron pretrain FILE {run}")
        conclude(Transfer(done.num_tensors, done.num_bytes), following)
