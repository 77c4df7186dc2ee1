"""The group of subcommands: each is imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .interrupts import raise_again

COMMANDS = {
    "plan": "plan",
    "probe": "probe",
    "verify": "verify",
    "generate": "generate",
    "serve": "serve",
    "add-key": "add_key",
    "bench": "bench",
    "config": "config",
    "env": "env",
    "launch": "launch",
    "run": "run",
    "test": "test",
    "quantize": "quantize",
    "merge-weights": "merge_weights",
}
"""Subcommand -> the module of this package whose function of the same name implements it."""


# Newer versions of typer bundle click, so the exception classes come from what typer exports.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickError: type[Exception] = typer.BadParameter.__mro__[2]


class LazyGroup(TyperGroup):
    """Imports a subcommand's module on first use."""

    def list_commands(self, context: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: Any, name: str) -> Any:
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"bigmodel.cli.{COMMANDS[name]}")
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        app.command(name, context_settings=settings)(getattr(module, COMMANDS[name]))
        command = typer.main.get_command(app)
        command.name = name
        # The whole first paragraph: typer would truncate it to one line.
        command.short_help = " ".join((command.help or "").split("\n\n")[0].split())
        raise_again()  # what the command begins may have to be undone
        return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run, serve and train models that do not fit their GPU.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bigmodel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    pass
