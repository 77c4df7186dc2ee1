"""`bigmodel env`: versions, machine and configuration for a bug report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def env(
    config_file: Annotated[
        Path | None, typer.Option("--config_file", "--config-file", help="The configuration to show.")
    ] = None,
) -> None:
    """Print versions, the machine and the active configuration."""
    from ..launch.report import environment_report

    typer.echo(environment_report(config_file))
