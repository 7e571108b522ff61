"""A command group that imports a sub-command only when it is called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from steptron.errors import ConfigError, UserError
from steptron.platform.world import world


@dataclass(frozen=True)
class LazyCommand:
    """Where a sub-command is (``module:attribute``, a function or a Typer app), and its line in the help."""

    target: str
    help: str

    def load(self, name: str) -> Any:
        """Imports the module and makes the command."""
        module, attribute = self.target.split(":")
        loaded = getattr(importlib.import_module(module), attribute)
        if not isinstance(loaded, typer.Typer):
            single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            single.command()(loaded)
            loaded = single
        command = typer.main.get_command(loaded)
        command.name = name
        return command


class LazyGroup(TyperGroup):
    """Lists ``lazy_commands`` without importing them; shows a `UserError` as one message and exits with its code."""

    lazy_commands: ClassVar[dict[str, LazyCommand]] = {}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        listed = {name: TyperCommand(name, help=lazy.help) for name, lazy in self.lazy_commands.items()}
        self.commands = {**listed, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        lazy = self.lazy_commands.get(name or "")
        return name, (lazy.load(str(name)) if lazy else command), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            if ctx.params.get("debug"):
                raise
            if isinstance(error, ConfigError) and world().local_rank > 0:
                raise typer.Exit(
                    error.exit_code
                ) from error  # all processes of a machine find the same; its first one says it
            typer.secho(str(error), fg=typer.colors.RED, err=True)
            raise typer.Exit(error.exit_code) from error
