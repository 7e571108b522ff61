"""Prints a configuration with the source of each value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steptron.config.differences import differences
from steptron.config.loader import Loaded
from steptron.config.problems import dotted
from steptron.config.schema import Section
from steptron.config.tree import Key, Source, children, dump, dump_scalar

_WIDEST_ALIGNED = 60


def render(loaded: Loaded) -> str:
    """The whole configuration as YAML, each value followed by its source as a comment.

    The text is a configuration file itself: loading it gives the same configuration. Of a run with stages the first
    one's settings are those of the file, and stages have what they differ in.
    """
    lines = list(_block(_first(loaded), (), loaded.sources[0]))
    if loaded.curriculum.is_staged:
        lines += _stages(loaded)
    width = max((len(text) for text, source in lines if source and len(text) <= _WIDEST_ALIGNED), default=0)
    return "".join(f"{text:<{width}}  # {source}\n" if source else f"{text}\n" for text, source in lines)


def render_json(loaded: Loaded) -> str:
    """The same for machines: ``{"config": the tree, "sources": {dotted key: {kind, file, line, text}}}``; of a run with
    stages ``{"stages": [{name, tokens, first_step, first_token, config, sources}, ...]}``."""
    stages = [
        {
            "config": stage.config.model_dump(mode="json"),
            "sources": {key: vars(source) for key, source in sources.items()},
        }
        for stage, sources in zip(loaded.curriculum.stages, loaded.sources, strict=True)
    ]
    if not loaded.curriculum.is_staged:
        return json.dumps(stages[0], indent=2)
    for stage, shown in zip(loaded.curriculum.stages, stages, strict=True):
        shown |= {name: getattr(stage, name) for name in ("name", "tokens", "clone_mtp", "first_step", "first_token")}
    return json.dumps({"stages": stages}, indent=2)


def to_yaml(config: Section) -> str:
    """A resolved configuration as YAML without sources; loading it gives the same configuration."""
    return dump(config.model_dump())


def _first(loaded: Loaded) -> dict[str, Any]:
    tree = loaded.config.model_dump()
    if loaded.curriculum.is_staged:
        del tree["train"]["steps"]  # follows from the stage's budget
    return tree


def _stages(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """Lines of the list of stages."""
    yield "stages:", ""
    first = _first(loaded)
    for stage, sources in zip(loaded.curriculum.stages, loaded.sources, strict=True):
        own: dict[str, Any] = {}
        for key, _, value in differences(first, stage.config.model_dump()):
            if key != "train.steps":
                *above, name = key.split(".")
                inner = own
                for step in above:
                    inner = inner.setdefault(step, {})
                inner[name] = value
        yield f"- name: {dump_scalar(stage.name)}", ""
        yield f"  tokens: {stage.tokens}", ""
        if stage.clone_mtp:
            yield "  clone_mtp: true", ""
        yield from ((f"  {text}", source) for text, source in (_block(own, (), sources) if own else ()))


def _block(value: object, path: tuple[Key, ...], sources: Mapping[str, Source]) -> Iterator[tuple[str, str]]:
    """Lines of YAML, each with its comment; lines that only open a section have none."""
    items = list(children(value))
    if not items:
        text = dump_scalar(str(value) if isinstance(value, Path) else value)  # type: ignore[arg-type]
        yield text, str(sources[dotted(path)])
    for key, inner in items:
        lines = list(_block(inner, (*path, key), sources))
        if isinstance(value, list):
            yield from (
                (f"{'- ' if number == 0 else '  '}{text}", source) for number, (text, source) in enumerate(lines)
            )
        elif not list(children(inner)):
            yield f"{dump_scalar(key)}: {lines[0][0]}", lines[0][1]
        else:
            yield f"{dump_scalar(key)}:", ""
            yield from ((f"  {text}", source) for text, source in lines)
