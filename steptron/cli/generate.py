"""``steptron generate``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    weights: Annotated[
        Path,
        typer.Argument(help="Checkpoint, a run's folder (its newest checkpoint), or a released model's folder."),
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens up to this probability.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json or its folder; the checkpoint's own by default."),
    ] = None,
) -> None:
    """Write text with a trained model."""
    from steptron.errors import UserError
    from steptron.platform import distributed

    if any(0xD800 <= ord(character) <= 0xDFFF for character in prompt):
        raise UserError("--prompt is not valid UTF-8 text")
    device, _ = distributed.start("auto", threads=None, timeout_seconds=60)

    from steptron.checkpoint.restore import restore_model
    from steptron.checkpoint.weights import open_weights
    from steptron.data.tokenizer import Tokenizer
    from steptron.model.sampling import sample_tokens

    opened = open_weights(weights)
    text = Tokenizer.load(tokenizer or opened.path)
    model = restore_model(opened, device, mtp_depths=0)
    tokens = text.encode(prompt) or [text.eod_id]
    if text.vocab_size > model.spec.vocab_size:
        raise UserError(
            f"the tokenizer has {text.vocab_size} tokens and the model {model.spec.vocab_size}: it is another model's"
        )
    length = opened.sequence_length
    if length is not None and len(tokens) + max_new_tokens > length:
        typer.echo(f"note: the model was trained on sequences of {length} tokens, this one gets longer", err=True)
    typer.echo(prompt, nl=False)
    decoder = text.stream_decoder()
    for token in sample_tokens(model, tokens, max_new_tokens, temperature, top_p, text.eod_id, seed):
        typer.echo(decoder.push(token), nl=False)
    typer.echo(decoder.finish())
    distributed.shutdown()
