"""``steptron checkpoint``: what is in checkpoints, and weights between the released layout and ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steptron.cli.checkpoints.inspect import inspect
from steptron.cli.checkpoints.prune import prune
from steptron.cli.checkpoints.reshard import reshard
from steptron.cli.checkpoints.verify import verify
from steptron.cli.compare import compare
from steptron.cli.transfers import Nproc, run_workers, starts_workers, transfer

if TYPE_CHECKING:
    from steptron.checkpoint.weights import CheckpointWeights

app = typer.Typer(
    name="checkpoint",
    help="Look into checkpoints, test, thin out and rewrite them; import, export and compare weights.",
    no_args_is_help=True,
)
for _command in (inspect, verify, prune, reshard, compare):
    app.command()(_command)


@app.command(name="import-hf")
def import_hf(
    folder: Annotated[Path, typer.Argument(help="Released model: config.json with safetensors files.")],
    output: Annotated[Path, typer.Argument(help="Checkpoint folder to write.", metavar="OUT")],
    nproc: Nproc = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Turn a released model into a checkpoint that every parallel layout reads.

    Missing, extra, wrongly shaped and wrongly typed tensors are all listed before anything is written. Tensors are
    moved piece by piece; no process holds more than 256 MiB of them.
    """
    from steptron.platform.megatron_cpu import install

    arguments = ["import-hf", str(folder), str(output), *(["--force"] if force else [])]
    if starts_workers(nproc):
        install()
        from steptron.checkpoint.weights import ReleasedWeights

        ReleasedWeights(folder)
        run_workers(nproc, arguments)
    with transfer("import", output) as (report, conclude):
        from steptron.checkpoint.released.importing import import_released
        from steptron.data.tokenizer import TOKENIZER_FILE

        done = import_released(folder, output, force=force, report=report)
        following = [
            f"steptron pretrain FILE train.initial_weights={output}   (FILE names {output}/model.yaml under base:)"
        ]
        if (output / TOKENIZER_FILE).is_file():
            following.append(f"steptron generate {output} --prompt 'Once upon a time'")
        conclude(done, following)


@app.command(name="export-hf")
def export_hf(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or a run's folder (its newest checkpoint).")],
    folder: Annotated[Path, typer.Argument(help="Released folder to write.")],
    max_shard_size: Annotated[
        str, typer.Option(help="Most bytes of tensors in a file: 5GB, 500MB, 4GiB or a number.")
    ] = "5GB",
    dtype: Annotated[
        Literal["bf16", "fp32"] | None,
        typer.Option(help="Convert the tensors; as they are by default. Router biases are always fp32."),
    ] = None,
    companions_from: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Released folder to take tokenizer, generation settings and remote code from."
        ),
    ] = None,
    nproc: Nproc = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a released folder that is there.")] = False,
) -> None:
    """Turn a checkpoint into a released model, with the names, shapes and dtypes that other engines load.

    One tensor at a time is in memory. The same command goes on where an interrupted one stopped.
    """
    from steptron.checkpoint.released.shards import parse_size
    from steptron.platform.megatron_cpu import install

    max_shard_bytes = parse_size(max_shard_size)
    if starts_workers(nproc):
        install()
        # A run's newest checkpoint now, not whichever each process would find.
        found = _opened(checkpoint).path
        arguments = ["export-hf", str(found), str(folder), "--max-shard-size", max_shard_size]
        for option, value in (("--dtype", dtype), ("--companions-from", companions_from)):
            arguments += [] if value is None else [option, str(value)]
        arguments += ["--force"] if force else []
        run_workers(nproc, arguments)
    with transfer("export", folder) as (report, conclude):
        from steptron.checkpoint.released.exporting import export_released

        try:
            done = export_released(
                _opened(checkpoint),
                folder,
                max_shard_bytes=max_shard_bytes,
                precision=dtype,
                companions_from=companions_from,
                force=force,
                report=report,
            )
        except KeyboardInterrupt:
            typer.echo("interrupted: what is complete stays; the same command goes on from there", err=True)
            raise
        conclude(done, [f"steptron checkpoint compare {checkpoint} {folder}"])


def _opened(checkpoint: Path) -> CheckpointWeights:
    from steptron.checkpoint.weights import CheckpointWeights, open_weights
    from steptron.errors import UserError

    weights = open_weights(checkpoint)
    if not isinstance(weights, CheckpointWeights):
        raise UserError(f"{checkpoint} is a released model already: name a checkpoint")
    return weights
