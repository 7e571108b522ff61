"""Prints a configuration with the source of each value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from steptron.config.loader import Loaded
from steptron.config.problems import dotted
from steptron.config.schema import Section
from steptron.config.tree import Key, children, dump, dump_scalar

_WIDEST_ALIGNED = 60


def render(loaded: Loaded) -> str:
    """The whole configuration as YAML, each value followed by its source as a comment.

    The text is a configuration file itself: loading it gives the same configuration.
    """
    lines = list(_block(loaded.config.model_dump(), (), loaded))
    width = max((len(text) for text, source in lines if source and len(text) <= _WIDEST_ALIGNED), default=0)
    return "".join(f"{text:<{width}}  # {source}\n" if source else f"{text}\n" for text, source in lines)


def render_json(loaded: Loaded) -> str:
    """The same for machines: ``{"config": the tree, "sources": {dotted key: {kind, file, line, text}}}``."""
    sources = {key: vars(source) for key, source in loaded.sources.items()}
    return json.dumps({"config": loaded.config.model_dump(mode="json"), "sources": sources}, indent=2)


def to_yaml(config: Section) -> str:
    """A resolved configuration as YAML without sources; loading it gives the same configuration."""
    return dump(config.model_dump())


def _block(value: object, path: tuple[Key, ...], loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Lines of YAML, each with its comment; lines that only open a section have none."""
    items = list(children(value))
    if not items:
        text = dump_scalar(str(value) if isinstance(value, Path) else value)  # type: ignore[arg-type]
        yield text, str(loaded.sources[dotted(path)])
    for key, inner in items:
        lines = list(_block(inner, (*path, key), loaded))
        if isinstance(value, list):
            yield from (
                (f"{'- ' if number == 0 else '  '}{text}", source) for number, (text, source) in enumerate(lines)
            )
        elif not list(children(inner)):
            yield f"{dump_scalar(key)}: {lines[0][0]}", lines[0][1]
        else:
            yield f"{dump_scalar(key)}:", ""
            yield from ((f"  {text}", source) for text, source in lines)
