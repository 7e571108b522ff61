"""`steptron model`: show the layers and sizes of a model, and run its weights to compare them."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptron.cli import inspection
from steptron.cli.tensors import tensors
from steptron.config.loader import Loaded, has_stages, load
from steptron.errors import ConfigError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from steptron.config.schema import PretrainConfig
    from steptron.model.layer_spec import ModelSpec
    from steptron.planning.flops import FlopsBreakdown
    from steptron.planning.parameters import ParameterCounts

app = typer.Typer(no_args_is_help=True)
app.command()(inspection.logits)
app.command()(inspection.trace)
app.command("trace-diff")(inspection.trace_diff)
app.command()(tensors)

ASSUMED_SEQUENCE_LENGTH = 4096
# What a file with nothing but a model lacks of a whole configuration. None of it changes the model.
_ASSUMED = f"""\
data: {{train: [{{path: unused}}], sequence_length: {ASSUMED_SEQUENCE_LENGTH}}}
optimizer: {{lr: 1.0}}
train: {{output: unused, steps: 1, global_batch_size: 1, micro_batch_size: 1}}
"""


@app.callback()
def _model() -> None:
    """Show a model, and run its weights to compare what they compute."""


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="YAML file: a model, or a whole configuration.", metavar="FILE")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that win over the file's.", metavar="[a.b=c]...")
    ] = None,
) -> None:
    """Print the layer table, exact parameter counts and FLOPs per token.

    Parameters are counted on the model as it is built, on the meta device (no memory is taken).
    """
    from rich.console import Console

    from steptron.model.layer_spec import model_spec
    from steptron.planning.built import built_shapes, check_shapes
    from steptron.planning.flops import training_flops_per_token
    from steptron.planning.parameters import count_parameters

    config, assumed = load_model_file(file, overrides or [])
    try:
        spec = model_spec(config.model)
        flops = training_flops_per_token(spec, config.data.sequence_length, config.loss.mtp_train_depths)
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    check_shapes(spec, built_shapes(config.model))

    console = Console(highlight=False)
    if not console.is_terminal:
        # In a pipe or file a table is not folded to a width that nobody sees.
        console = Console(highlight=False, width=200)
    _print_layers(console, spec)
    _print_counts(console, spec, count_parameters(spec))
    _print_flops(console, config, flops, assumed)


def load_model_file(file: Path, overrides: list[str]) -> tuple[PretrainConfig, bool]:
    """Loads a model file or a whole configuration; whether the sequence length is assumed, too."""
    if not os.path.isfile(file):  # Path.is_file raises for some names, such as too long ones
        raise UserError(f"{file}: there is no such file")
    if has_stages(file):
        return load(file, overrides).config, False
    with tempfile.TemporaryDirectory() as folder:
        assumed, wrapper = Path(folder, "assumed.yaml"), Path(folder, "wrapper.yaml")
        assumed.write_text(_ASSUMED, encoding="utf-8")
        # A JSON string is a YAML string, whatever characters the path has.
        wrapper.write_text(f"base: {json.dumps([assumed.name, str(file.resolve())])}\n", encoding="utf-8")
        try:
            loaded: Loaded = load(wrapper, overrides)
        except ConfigError as error:
            raise ConfigError(str(file), error.problems) from error
        return loaded.config, loaded.sources[0]["data.sequence_length"].file == str(assumed.resolve())


def _print_layers(console: Console, spec: ModelSpec) -> None:
    from rich import box
    from rich.table import Table

    from steptron.planning.layer_table import HEADINGS, describe_layer, index_ranges, layer_rows, legend

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("layer", max_width=24)
    table.add_column("count", justify="right")
    for heading in HEADINGS:
        table.add_column(heading)
    table.add_column("parameters each", justify="right")
    for row in layer_rows(spec.layers):
        cells = describe_layer(row.layer)
        table.add_row(index_ranges(row.indices), str(len(row.indices)), *cells, f"{row.parameters:,}")
    for depth in spec.mtp:
        size = sum(parameter.size for parameter in depth.parameters())
        table.add_row(f"MTP {depth.layer.index + 1}", "1", *describe_layer(depth.layer), f"{size:,}")
    console.print(table)
    for line in legend([*spec.layers, *(depth.layer for depth in spec.mtp)]):
        console.print(line)
    if spec.mtp:
        chain = "before" if spec.mtp[0].pre_norm_chain else "after"
        head = "its own output matrix" if spec.mtp[0].own_head else "the main model's output matrix"
        console.print(f"MTP: each depth takes the hidden state {chain} the final norm and has {head}")


def _print_counts(console: Console, spec: ModelSpec, counts: ParameterCounts) -> None:
    rows = [
        ("main model", counts.main),
        ("  of it: embedding", counts.embedding),
        ("  of it: output matrix", counts.head),
        *((f"MTP depth {number}", size) for number, size in enumerate(counts.mtp, start=1)),
        *([("value head", counts.value_head)] if counts.value_head else []),
        ("together", counts.total),
    ]
    console.print("\nParameters")
    _print_figures(console, rows)
    console.print("\nActive per token, main model")
    _print_figures(
        console,
        [
            ("without embedding and output matrix", counts.active),
            ("with output matrix", counts.active_with_head),
            ("with embedding and output matrix", counts.active_with_embedding_and_head),
        ],
    )


def _print_figures(console: Console, rows: list[tuple[str, int]]) -> None:
    for name, value in rows:
        console.print(f"  {name:<37}{value:>19,}  {_short(value)}")


def _print_flops(console: Console, config: PretrainConfig, flops: FlopsBreakdown, assumed: bool) -> None:
    length = f"{config.data.sequence_length:,}" + (" (assumed)" if assumed else "")
    console.print(
        f"\nModel FLOPs per token of a training step: sequence length {length}, "
        f"MTP depths in training {config.loss.mtp_train_depths}"
    )
    for name, value in dataclasses.asdict(flops).items():
        console.print(f"  {name.replace('_', ' '):<37}{value:>19,.0f}  {value / flops.total:6.1%}")
    console.print(f"  {'together':<37}{flops.total:>19,.0f}  {_short(flops.total)}")


def _short(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value / 1e3:.2f}K"
