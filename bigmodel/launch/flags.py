"""The command line of `bigmodel launch`: flags, the script, and the script's own arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import LaunchError
from . import unsupported
from .config_file import find_default_config, load_config
from .options import Option, coerce, nearest
from .settings import LaunchConfig, all_options

_KINDS = {
    "multi_gpu": ("MULTI_GPU", "One process on each GPU."),
    "use_deepspeed": ("DEEPSPEED", "Train with DeepSpeed ZeRO."),
    "use_fsdp": ("FSDP", "Train with fully sharded data parallelism."),
}


@dataclass(frozen=True)
class Launch:
    """A parsed command line: the effective settings, the script, its arguments and how to start it.

    Attributes:
        config_file: the file the settings started from, or None.
        module: `script` is a module name, started as `python -m`.
        no_python: `script` is a program of its own.
        explicit: names of the options given as flags.
    """

    config: LaunchConfig
    script: str
    script_arguments: tuple[str, ...] = ()
    config_file: str | None = None
    module: bool = False
    no_python: bool = False
    quiet: bool = False
    explicit: frozenset[str] = frozenset()


class _LaunchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}.")


def build_parser() -> argparse.ArgumentParser:
    """The parser of everything before the script's name. Flags may be written with hyphens or underscores."""
    parser = _LaunchParser(
        prog="bigmodel launch",
        usage="bigmodel launch [flags] script.py [script flags]",
        description="Start a training script on the processes, GPUs and machines a configuration describes. "
        "Flags win over the configuration file. Hyphens and underscores in flags are the same.",
        allow_abbrev=False,
    )
    parser.add_argument("--config_file", help="Configuration file. Default: the one `bigmodel config` wrote.")
    parser.add_argument("-m", "--module", action="store_true", help="The script is a module name.")
    parser.add_argument("--no_python", action="store_true", help="The script is an executable; run it without Python.")
    parser.add_argument("-q", "--quiet", action="store_true", help="No summary when a process fails.")
    parser.add_argument("--cpu", dest="use_cpu", action="store_const", const=True, help="The same as --use_cpu.")
    for flag, (_, text) in _KINDS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_argument("--use_parallelism_config", action="store_true", help="Use the parallelism sizes.")
    for option in all_options().values():
        _add(parser, option)
    return parser


def parse_launch(arguments: list[str]) -> Launch:
    """Read `[flags] script [script flags]`.

    Raises:
        LaunchError: an unknown flag (the message names the nearest), a wrong value, or no script.
    """
    own, rest = _split(arguments)
    namespace = vars(build_parser().parse_args(own))
    if not rest:
        raise LaunchError("no script given. Usage: bigmodel launch [flags] script.py [script flags]")
    options = all_options()
    given = {
        name: coerce(options[name], value, "command line")
        for name, value in namespace.items()
        if name in options and value is not None
    }
    given.update(_kind_of_training(namespace, given))
    config_file = namespace["config_file"] or find_default_config()
    config = load_config(config_file, overridden=given) if config_file else LaunchConfig()
    return Launch(
        config=config.replace(given),
        script=rest[0],
        script_arguments=tuple(rest[1:]),
        config_file=str(config_file) if config_file else None,
        module=namespace["module"],
        no_python=namespace["no_python"],
        quiet=namespace["quiet"],
        explicit=frozenset(given),
    )


def _kind_of_training(namespace: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    chosen = [flag for flag in _KINDS if namespace[flag]]
    if len(chosen) > 1:
        raise LaunchError(f"--{' and --'.join(chosen)} exclude each other; give one of them.")
    if namespace["multi_gpu"] and given.get("use_cpu"):
        raise LaunchError("--multi_gpu and --cpu exclude each other; give one of them.")
    if not chosen:
        return {}
    kind = {"distributed_type": _KINDS[chosen[0]][0]}
    return {**kind, "use_cpu": False} if namespace["multi_gpu"] else kind


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own flags, spelled with underscores, and the rest: the script and its arguments."""
    takes_value = _flags_with_value()
    known = _known_flags()
    own: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return own, arguments[position + 1 :]
        if not argument.startswith("-") or argument == "-":
            return own, arguments[position:]
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        if name not in known:
            unsupported.check_flag(name.lstrip("-"))
            raise LaunchError(f"unknown flag {argument!r}.{nearest(name, known)}")
        own.append(name + equals + value)
        position += 1
        if name in takes_value and not equals:
            if position == len(arguments):
                raise LaunchError(f"{name} needs a value.")
            own[-1] = f"{name}={arguments[position]}"
            position += 1
    return own, []


def _known_flags() -> set[str]:
    return {flag for action in build_parser()._actions for flag in action.option_strings}


def _flags_with_value() -> set[str]:
    actions = build_parser()._actions
    return {flag for action in actions if action.nargs is None for flag in action.option_strings}


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.switch:
        parser.add_argument(f"--{option.name}", action="store_const", const=True, help=text)
    else:
        choices = f" One of: {', '.join(option.choices)}." if option.choices else ""
        parser.add_argument(f"--{option.name}", metavar=option.kind.upper(), help=text + choices)
