"""`bigmodel bench`: the benchmarks, the same as `python -m benchmarks`."""

from __future__ import annotations

import typer

CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Passes all arguments after `bench` on to the benchmarks unchanged, `--help` included."""


def bench(context: typer.Context) -> None:
    """Run a benchmark: memory, load, decode, ... (without NAME: list them; NAME --help: explain one)."""
    from bigmodel.benchmarks.command import run
    from bigmodel.benchmarks.harness import UsageError

    try:
        code = run(context.args, program="bigmodel bench")
    except UsageError as error:
        typer.echo(f"bigmodel bench: {error}", err=True)
        code = 2
    raise typer.Exit(code)
