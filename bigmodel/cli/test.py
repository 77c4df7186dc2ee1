"""`bigmodel test`: run the bundled check of a configuration on this machine."""

# The command is called `test`, so linters take its function for a test.
# ruff: noqa: PT028

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def test(
    config_file: Annotated[
        Path | None, typer.Option("--config_file", "--config-file", help="The configuration to check.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Check on the CPU.")] = False,
    num_processes: Annotated[
        int | None, typer.Option("--num_processes", "--num-processes", min=1, help="Processes to start.")
    ] = None,
) -> None:
    """Launch a small training job with the configuration and check what it computes."""
    from ..launch import parse_launch, run

    arguments = ["--config_file", str(config_file)] if config_file else []
    arguments += ["--cpu"] if cpu else []
    arguments += ["--num_processes", str(num_processes)] if num_processes else []
    code = run(parse_launch([*arguments, "--module", "bigmodel.launch.sanity"]))
    if code:
        raise typer.Exit(code)
