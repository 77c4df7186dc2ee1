"""The functions behind ``accelerate launch`` and ``accelerate config``, for programs that call them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..launch import Launch, LaunchConfig, build_parser, load_config, parse_launch, run
from ..launch.config_file import default_config_path, find_default_config

_default = find_default_config() or default_config_path()
cache_dir = str(_default.parent)
"""The folder of the default configuration file."""
default_config_file = str(_default)
"""The configuration file that is used if none is named, accelerate's or ours."""


def load_config_from_file(config_file: str | Path | None) -> LaunchConfig:
    """Read a configuration file; None means the default one.

    Raises:
        LaunchError: It is missing or damaged.
    """
    return load_config(default_config_file if config_file is None else config_file)


class LaunchParser:
    """Reads the arguments of `bigmodel launch`; what it returns is for `launch_command`."""

    def parse_args(self, args: Sequence[str] | None = None) -> Launch:
        """Return the launch that the arguments (None: those of this program) ask for.

        Raises:
            LaunchError: An argument is unknown or wrong, or there is no script.
        """
        return parse_launch(list(sys.argv[1:] if args is None else args))

    def format_help(self) -> str:
        """Return the help of `bigmodel launch`."""
        return build_parser().format_help()


def launch_command_parser() -> LaunchParser:
    """Return the parser of `bigmodel launch`."""
    return LaunchParser()


def launch_command(args: Launch) -> None:
    """Run what `launch_command_parser` has read. Exits with the code of a script that failed."""
    code = run(args)
    if code:
        raise SystemExit(code)
