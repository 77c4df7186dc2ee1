"""`bigmodel config`: write the configuration that `bigmodel launch` reads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Action(str, Enum):
    """Non-interactive actions of `bigmodel config`."""

    default = "default"
    update = "update"


def config(
    action: Annotated[
        Action | None,
        typer.Argument(help="default: write without questions. update: rewrite an older file in the current format."),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config_file", "--config-file", help="The file to write.")
    ] = None,
    mixed_precision: Annotated[
        str, typer.Option("--mixed_precision", "--mixed-precision", help="With default: no, fp16, bf16 or fp8.")
    ] = "no",
) -> None:
    """Ask a few questions and write the configuration file of `bigmodel launch`."""
    from ..launch.config_file import (
        default_config_path,
        find_default_config,
        load_config,
        save_config,
        write_basic_config,
    )
    from ..launch.questions import ask_configuration

    path = config_file or default_config_path()
    if action is Action.default:
        if write_basic_config(mixed_precision, path) is None:
            typer.echo(f"{path} already exists and was not changed.")
            return
    elif action is Action.update:
        path = config_file or find_default_config() or path
        save_config(load_config(path), path)
    else:
        save_config(ask_configuration(), path)
    typer.echo(f"Configuration written to {path}")
