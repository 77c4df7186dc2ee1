"""`bigmodel launch`: start a training script on processes, GPUs and machines."""

from __future__ import annotations

from typing import Any

import typer

# Everything after `launch` is read by the launcher's own parser: its flags end at the script's name, and
# what follows the script belongs to the script, also flags of the same name, and `--help`.
CONTEXT_SETTINGS: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def launch(context: typer.Context) -> None:
    """Start a training script: bigmodel launch [flags] script.py [script flags]."""
    from ..launch import build_parser, parse_launch, run

    arguments = list(context.args)
    if arguments in (["--help"], ["-h"]):
        build_parser().print_help()
        return
    code = run(parse_launch(arguments))
    if code:
        raise typer.Exit(code)
