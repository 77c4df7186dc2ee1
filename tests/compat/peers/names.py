"""Counts the names of accelerate's modules that are here under the same names: `python -m tests.compat.peers.names`.

A name is *defined* by a module of accelerate where its source assigns it or has a function or class of that name;
``accelerate`` and ``accelerate.utils`` define what they import from accelerate's other modules. Others are imported in
passing (torch, os, what other modules define) and are counted apart. Loggers and names with an underscore are not
counted. A name is *there*, *refused* (it stands for what is not supported: a call is an error that says so) or missing.

Parameters of functions and public members of classes that are there are compared, too. Accelerate has to be installed.
Exits with 1 if a name is missing that has no reason in `ABSENT`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = (
    *("", "utils", "state", "logging", "tracking", "data_loader", "hooks", "big_modeling", "scheduler", "optimizer"),
    *("launchers", "local_sgd", "inference", "accelerator", "parallelism_config"),
    *(f"utils.{name}" for name in ("ao", "bnb", "constants", "dataclasses", "deepspeed", "environment", "fsdp_utils")),
    *(f"utils.{name}" for name in ("imports", "launch", "megatron_lm", "memory", "modeling", "offload", "operations")),
    *(f"utils.{name}" for name in ("other", "random", "torch_xla", "tqdm", "transformer_engine", "versions")),
    *(f"commands.{name}" for name in ("accelerate_cli", "config", "config.config_args", "config.default", "env")),
    *(f"commands.{name}" for name in ("launch", "merge", "test", "tpu")),
)
"""Modules that programs import from; "" is ``accelerate`` itself."""

LEFT_OUT = {
    "questions on a terminal, asked otherwise here": (
        *("commands.config.cluster", "commands.config.config", "commands.config.config_utils"),
        *("commands.config.sagemaker", "commands.config.update", "commands.menu.cursor", "commands.menu.helpers"),
        *("commands.menu.input", "commands.menu.keymap", "commands.menu.selection_menu", "commands.utils"),
    ),
    "`bigmodel plan` says more": ("commands.estimate",),
    "files of version 1 run as they are": ("commands.to_fsdp2",),
    "saving and loading are methods of the Accelerator": ("checkpointing",),
}
"""Modules of accelerate that are not here."""

ABSENT = {
    "parts of accelerate's command line, whose arguments are read otherwise here": """
        commands.config.get_config_parser commands.config.default.default_command_parser
        commands.config.default.default_config_command commands.config.default.description
        commands.env.env_command commands.env.env_command_parser commands.launch.CustomHelpFormatter
        commands.launch.clean_option commands.launch.deepspeed_launcher commands.launch.multi_gpu_launcher
        commands.launch.options_to_group commands.launch.sagemaker_launcher commands.launch.simple_launcher
        commands.launch.tpu_launcher commands.launch.tpu_pod_launcher commands.merge.description
        commands.test.test_command commands.test.test_command_parser""",
}
REASON_OF = {name: reason for reason, names in ABSENT.items() for name in names.split()}


@dataclass
class Count:
    """Names of one module of accelerate, by what became of them here.

    Attributes:
        module: Its name below ``accelerate``.
        there: Defined there, real here.
        refused: Defined there, and a call is an error here.
        missing: Defined there, and not here.
        passing: Imported in passing there, and here, too.
        passing_missing: Imported in passing there, and not here.
    """

    module: str
    there: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    passing: list[str] = field(default_factory=list)
    passing_missing: list[str] = field(default_factory=list)


def count(module: str) -> Count:
    """Compare a module of accelerate with the one of the same name here."""
    from bigmodel.compat.refused import Refused

    theirs, ours = _theirs(module), _ours(module)
    defined, passing = _names(module)
    found = Count(module)
    for name in sorted(name for name in defined if hasattr(theirs, name)):
        if not hasattr(ours, name):
            found.missing.append(name)
        else:
            (found.refused if isinstance(getattr(ours, name), Refused) else found.there).append(name)
    for name in sorted(name for name in passing if hasattr(theirs, name)):
        (found.passing if hasattr(ours, name) else found.passing_missing).append(name)
    return found


def differences(found: Count) -> Iterator[str]:
    """Yield a line for each parameter and each public member that accelerate's objects have and ours lack."""
    theirs, ours = _theirs(found.module), _ours(found.module)
    for name in found.there:
        their, our = getattr(theirs, name), getattr(ours, name)
        label = f"{found.module}.{name}".strip(".")
        yield from _parameters(label, their, our)
        if not inspect.isclass(their):
            continue
        fields = getattr(our, "__annotations__", {})
        for member in (member for member in dir(their) if not member.startswith("_")):
            if hasattr(our, member):
                if inspect.isfunction(getattr(their, member)):
                    yield from _parameters(f"{label}.{member}", getattr(their, member), getattr(our, member))
            elif member not in fields:
                yield f"{label} has no {member}"


def _parameters(label: str, their: Any, our: Any) -> Iterator[str]:
    if not (inspect.isfunction(their) or inspect.isclass(their)):
        return
    try:
        wanted, given = inspect.signature(their).parameters, inspect.signature(our).parameters
    except (TypeError, ValueError):  # built in, or its signature is not known
        return
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    if any(each.kind == inspect.Parameter.VAR_KEYWORD for each in given.values()):
        return
    lacking = [name for name, each in wanted.items() if name not in given and each.kind not in variable]
    if lacking:
        yield f"{label} takes no {', '.join(lacking)}"


def _theirs(module: str) -> ModuleType:
    return import_module(f"accelerate.{module}".rstrip("."))


def _ours(module: str) -> ModuleType | None:
    name = f"bigmodel.{module}" if module else "bigmodel.compat.accelerate"
    return import_module(name) if find_spec(name) else None


def _names(module: str) -> tuple[set[str], set[str]]:
    """Return the names that a module of accelerate defines, and those that it imports in passing."""
    file = _theirs(module).__file__
    assert file is not None
    own: set[str] = set()
    imported: dict[bool, set[str]] = {True: set(), False: set()}
    for node in _statements(ast.parse(Path(file).read_text()).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Assign):
            own.update(each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            imported[bool(node.level)].update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            imported[False].update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    if module in ("", "utils"):
        own |= imported.pop(True)
    public = {name for name in own if not name.startswith("_") and name != "logger"}
    return public, {name for names in imported.values() for name in names if not name.startswith("_")} - own


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those inside conditions and `try` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def main(arguments: list[str]) -> int:
    """Print a line for each module and what is missing in it. ``--members`` prints parameters and members, too."""
    if find_spec("accelerate") is None:
        print("names of accelerate: not counted, accelerate is not installed")
        return 0
    counts = [count(module) for module in MODULES]
    unexplained = 0
    for found in counts:
        name = f"accelerate.{found.module}".rstrip(".")
        defined = len(found.there) + len(found.refused) + len(found.missing)
        print(f"{name}: {defined} defined, {len(found.there)} there, {len(found.refused)} refused; ", end="")
        print(f"{len(found.passing)} of {len(found.passing) + len(found.passing_missing)} imported in passing there")
        for lacking in found.missing:
            reason = REASON_OF.get(f"{found.module}.{lacking}".strip("."))
            unexplained += reason is None
            print(f"  {lacking}: missing, {reason or 'NO REASON'}")
        for line in differences(found) if "--members" in arguments else ():
            print(f"  {line}")
    for reason, modules in LEFT_OUT.items():
        print(f"not here, {sum(len(_names(module)[0]) for module in modules)} names: {', '.join(modules)}: {reason}")
    there = sum(len(each.there) for each in counts)
    refused = sum(len(each.refused) for each in counts)
    missing = sum(len(each.missing) for each in counts)
    total = there + refused + missing
    print(f"names that accelerate defines in these {len(counts)} modules: {total}; {there} there, ", end="")
    print(f"{refused} refused by name, {missing} missing, {unexplained} of these without a reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
