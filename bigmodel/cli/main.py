"""The `bigmodel` command: dispatches to a subcommand and reports errors as one line and an exit code.

Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted. `--debug` shows the traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import BigModelError
from .quiet import quieten

COMMANDS = {
    "plan": "plan",
    "probe": "probe",
    "verify": "verify",
    "generate": "generate",
    "serve": "serve",
    "bench": "bench",
    "config": "config",
    "env": "env",
    "launch": "launch",
    "test": "test",
    "merge-weights": "merge_weights",
}
"""Subcommand -> the module of this package whose function of the same name implements it."""


# Newer versions of typer bundle click, so the exception classes come from what typer exports.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ClickError: type[Exception] = typer.BadParameter.__mro__[2]


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
        return command


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run, serve and train models that do not fit their GPU.",
)


@app.callback()
def _root(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_debug(given)
    if given[:1] != ["launch"]:  # a launched script keeps its own logging
        quieten()
    if not faulthandler.is_enabled():  # a truncated mapped checkpoint raises SIGBUS: show where
        faulthandler.enable(sys.__stderr__ or 2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # unencodable characters must not fail the command
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(given, debug))


def run(arguments: Sequence[str], debug: bool = False) -> int:
    """Run the command line and return its exit code."""
    try:
        arguments = list(arguments) or ["--help"]
        code = typer.main.get_command(app).main(arguments, prog_name="bigmodel", standalone_mode=False)
    except _ClickError as error:
        return _fail(error.format_message(), 2 if isinstance(error, _UsageError) else 1, debug)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130, debug)
    except BrokenPipeError:
        # The reader of standard output has closed it; nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BigModelError, OSError, ImportError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__, 1, debug)
    # typer itself turns Ctrl-C into exit code 130.
    return _fail("interrupted", 130, debug) if code == 130 else code if isinstance(code, int) else 0


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    typer.echo("bigmodel: " + " ".join(message.split()), err=True)
    return code


def _take_debug(arguments: list[str]) -> bool:
    """Remove `--debug` at any position, except from the flags of a launched script; return whether it was there."""
    end = arguments.index("launch") if "launch" in arguments else len(arguments)
    found = "--debug" in arguments[:end]
    arguments[:end] = [argument for argument in arguments[:end] if argument != "--debug"]
    return found


if __name__ == "__main__":
    main()
