"""`steptron model tensors`: the tensors of a model as they are stored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from steptron.errors import UserError

if TYPE_CHECKING:
    from steptron.checkpoint.released.names import Precision, ReleasedTensor


def tensors(
    file: Annotated[Path, typer.Argument(help="YAML file: a model, or a whole configuration.", metavar="FILE")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that win over the file's.", metavar="[a.b=c]...")
    ] = None,
    layout: Annotated[
        Literal["released"], typer.Option(help="Whose names: those of the released Hugging Face checkpoint.")
    ] = "released",
    dtype: Annotated[
        Literal["bf16", "fp32"], typer.Option(help="Of everything but the router's selection biases, which are fp32.")
    ] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List the stored tensors of a configuration: name, shape, dtype and bytes."""
    from steptron.checkpoint.released.names import released_tensors
    from steptron.cli.model import load_model_file
    from steptron.model.layer_spec import model_spec

    config, _ = load_model_file(file, overrides or [])
    try:
        listed = released_tensors(model_spec(config.model))
    except ValueError as error:
        raise UserError(f"{file}: {error}") from error
    if as_json:
        typer.echo(json.dumps(_as_json(listed, dtype, layout), indent=2))
    else:
        _print(listed, dtype)


def _as_json(listed: list[ReleasedTensor], dtype: Precision, layout: str) -> dict[str, object]:
    return {
        "layout": layout,
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.precision(dtype),
                "bytes": tensor.num_bytes(dtype),
            }
            for tensor in listed
        ],
        "count": len(listed),
        "parameters": sum(math.prod(tensor.shape) for tensor in listed),
        "bytes": sum(tensor.num_bytes(dtype) for tensor in listed),
    }


def _print(listed: list[ReleasedTensor], dtype: Precision) -> None:
    rows = [
        (tensor.name, str(list(tensor.shape)), tensor.precision(dtype), f"{tensor.num_bytes(dtype):,}")
        for tensor in listed
    ]
    name_width, shape_width, _, bytes_width = (max(len(row[column]) for row in rows) for column in range(4))
    for name, shape, precision, size in rows:
        typer.echo(f"{name:<{name_width}}  {shape:<{shape_width}}  {precision}  {size:>{bytes_width}}")
    parameters = sum(math.prod(tensor.shape) for tensor in listed)
    size = f"{sum(tensor.num_bytes(dtype) for tensor in listed):,}"
    typer.echo(f"\n{len(listed):,} tensors, {parameters:,} parameters, {size} bytes")
