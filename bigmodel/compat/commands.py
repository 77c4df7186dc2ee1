"""The functions behind accelerate's ``launch``, ``config`` and ``merge-weights``, for programs that call them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..launch import Launch, build_parser, parse_launch, run
from ..launch.config_file import default_config_path, find_default_config
from .cluster_config import ClusterConfig

_default = find_default_config() or default_config_path()
cache_dir = str(_default.parent)
"""The folder of the default configuration file."""
default_config_file = str(_default)
"""The configuration file that is used if none is named, accelerate's or ours."""


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig:
    """Read a configuration file; None means the default one.

    Raises:
        LaunchError: It is missing or damaged.
    """
    return ClusterConfig.from_yaml_file(default_config_file if config_file is None else config_file)


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


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `merge_command`: a command of `subparsers` if given, else one of its own."""
    text = "Merge the sharded weights of an FSDP training checkpoint."
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser(description=text)
    else:
        parser = subparsers.add_parser("merge-weights", description=text)
        parser.set_defaults(func=merge_command)
    parser.add_argument("checkpoint_directory", help="Folder with the sharded weights.")
    parser.add_argument("output_path", help="Folder to write the merged weights to.")
    for flag, help_text in (
        ("--unsafe_serialization", "Write .bin files, not safetensors."),
        ("--remove_checkpoint_dir", "Delete the sharded weights afterwards."),
    ):
        parser.add_argument(flag, flag.replace("_", "-"), action="store_true", help=help_text)
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge what `merge_command_parser` has read.

    Raises:
        CheckpointError: There are no shards, or their index is damaged.
    """
    from ..train.strategies.sharded.merge import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory,
        args.output_path,
        safe_serialization=not args.unsafe_serialization,
        remove_checkpoint_dir=args.remove_checkpoint_dir,
    )
