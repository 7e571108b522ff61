"""The list of fields against pydantic's own JSON schema, and how the command prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from steptron.cli.main import app
from steptron.config.reference import REQUIRED, FieldReference, field_references, is_below
from steptron.config.schema import PretrainConfig
from steptron.config.tree import Source, parse

FIELDS = {field.name: field for field in field_references(PretrainConfig)}
runner = CliRunner()


def schema_fields(schema: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict, bool]]:
    """Name, JSON schema and requiredness of every field, read off ``model_json_schema``."""
    for key, field in schema["properties"].items():
        name = f"{prefix}{key}"
        yield name, field, key in schema.get("required", [])
        for member in field.get("anyOf", [field]):
            inner = f"{name}.N." if member.get("type") == "array" else f"{name}."
            reference = member.get("items", member).get("$ref")
            if reference:
                yield from schema_fields(definitions[reference.removeprefix("#/$defs/")], definitions, inner)


def test_every_field_is_listed_with_its_description_and_default() -> None:
    schema = PretrainConfig.model_json_schema()
    expected = list(schema_fields(schema, schema["$defs"], ""))
    assert [name for name, _, _ in expected] == list(FIELDS)
    for name, field, required in expected:
        assert FIELDS[name].description == field["description"] and field["description"].strip()
        assert (FIELDS[name].default == REQUIRED) == required
        if "default" in field and not isinstance(field["default"], dict):
            node, problems = parse(FIELDS[name].default, lambda line: Source("default"))
            assert problems == [] and node.plain() == field["default"]


@pytest.mark.parametrize(
    "name, values, default",
    [
        ("model.num_layers", "int > 0 and <= 10,000", REQUIRED),
        ("model.full.rope.scaling", "section | null", "null"),
        ("model.clamp.routed", "mapping of int to float > 0", "{}"),
        ("model.norm_eps", "float >= 1e-30", "1.0e-05"),
        ("model.init", "section", ""),
        ("optimizer.name", "muon | adamw | sgd", "muon"),
        ("optimizer.beta1", "float >= 0 and < 1", "0.9"),
        ("data.train", "list of sections, at least 1 item", REQUIRED),
        ("data.train.N.path", "path", REQUIRED),
        ("train.threads", "int > 0 and <= 4,096 | null", "null"),
        ("train.logging.tensorboard", "bool", "true"),
        ("train.logging.wandb_project", "text | null", "null"),
    ],
)
def test_types_bounds_and_defaults(name: str, values: str, default: str) -> None:
    assert (FIELDS[name].values, FIELDS[name].default) == (values, default)


def test_a_prefix_is_whole_names_and_items_may_be_numbered() -> None:
    assert is_below("data.train.N.path", "data.train.0") and is_below("data.train.N.path", "data.train.N.path")
    assert is_below("model.init.std", "model") and not is_below("model.init.std", "model.in")
    assert not is_below("optimizer", "optimizer.schedule")


def lines(*arguments: str) -> list[FieldReference]:
    done = runner.invoke(app, ["config", "fields", *arguments])
    assert done.exit_code == 0, done.output
    return [FieldReference(*line.split("\t")) for line in done.stdout.splitlines()]


def test_piped_output_is_a_line_per_field() -> None:
    assert lines() == list(FIELDS.values())
    assert [field.name for field in lines("optimizer.schedule.segments")] == [
        "optimizer.schedule.segments",
        "optimizer.schedule.segments.N.steps",
        "optimizer.schedule.segments.N.kind",
        "optimizer.schedule.segments.N.end_lr",
    ]


def test_an_unknown_prefix_is_refused() -> None:
    done = runner.invoke(app, ["config", "fields", "optimiser"])
    assert done.exit_code == 2 and "no field is named optimiser; the sections are model, balance" in done.output


def test_on_a_terminal_there_is_a_table_that_needs_no_colour() -> None:
    terminal = {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "400"}
    done = runner.invoke(app, ["config", "fields", "optimizer"], env=terminal)
    assert done.exit_code == 0, done.output
    rows = [tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in done.stdout.splitlines() if "│" in line]
    expected = [field for field in FIELDS.values() if is_below(field.name, "optimizer")]
    assert rows == [(field.name, field.values, field.default, field.description) for field in expected]


def test_roles_are_listed_with_what_muon_takes_and_can_take() -> None:
    done = runner.invoke(app, ["config", "roles"])
    assert done.exit_code == 0, done.output
    rows = {role: rest for role, *rest in (line.split("\t") for line in done.stdout.splitlines())}
    assert len(rows) == 21 and "router_bias" not in rows
    assert rows["query"] == rows["expert_up"] == ["muon", "yes"] and rows["router"] == ["adamw", "yes"]
    assert rows["embedding"] == rows["norm"] == rows["sink"] == rows["value_head"] == ["adamw", "no"]
