"""Takes out one piece of synchronisation at a time, and looks whether a test fails.

    python -m tests.tools.mutants [--only TEXT ...] [--list]

A mutant lacks one wait, one event that is recorded or waited for, one thing said to the allocator, or one lock, in the
modules that move weights. Each runs in a forked process, in which the mutant is imported in the place of the module.
Survivors are printed with their line; the last line is the score.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "bigmodel.checkpoint.upload",
    "bigmodel.devices.streams",
    "bigmodel.dispatch.transfer.disk_reader",
    "bigmodel.dispatch.transfer.fetcher",
    "bigmodel.dispatch.transfer.quantized_transfer",
    "bigmodel.dispatch.transfer.read_job",
    "bigmodel.dispatch.transfer.speculative_reads",
    "bigmodel.dispatch.transfer.staging",
    "bigmodel.dispatch.transfer.to_host",
    "bigmodel.dispatch.streaming.slots",
    "bigmodel.dispatch.streaming.streamer",
    "bigmodel.dispatch.experts.cache",
    "bigmodel.dispatch.experts.lazy_tensors",
)
TESTS = (
    ("tests/checkpoint/test_upload.py", "tests/dispatch/transfer/test_to_host.py"),
    ("tests/dispatch/test_locks.py", "tests/dispatch/test_strict.py"),
    ("-m", "not slow", *(f"tests/dispatch/{room}" for room in ("streaming", "transfer", "experts"))),
    ("-m", "not slow", "tests/devices/test_streams.py", "tests/dispatch/test_dispatch.py"),
)
"""Arguments of pytest, one call after another until one fails."""

SECONDS = 120
"""After so long a mutant counts as caught: it hangs."""

_CALLS = {
    *("wait", "synchronize", "wait_event", "uses", "record_stream", "record", "mark", "notify_all"),
    *("await_arrival", "result"),
}
"""Methods whose call is taken out, where it is a statement of its own."""

_EVENTS = {"drained", "restored", "marks", "ready"}
"""Attributes that hold events: an assignment to one is taken out."""


class Mutant(NamedTuple):
    """One change: the module, the line, what is taken out, and the source without it."""

    module: str
    line: int
    what: str
    source: str


def mutants(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    path = ROOT / (module.replace(".", "/") + ".py")
    text = path.read_text()
    for number in range(sum(1 for _ in _places(ast.parse(text)))):
        tree = ast.parse(text)
        node, change = list(_places(tree))[number]
        before = ast.unparse(node).splitlines()[0]
        change()
        yield Mutant(module, node.lineno, before, ast.unparse(ast.fix_missing_locations(tree)))


def _places(tree: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Yield statements and calls that synchronise, each with a function that takes it out."""
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                for position, statement in enumerate(value):
                    if _is_call(statement) or _sets_event(statement):
                        yield statement, _replacing(value, position, ast.Pass())
                    elif _locks(statement):
                        plain = ast.If(ast.Constant(True), statement.body, [])
                        yield statement, _replacing(value, position, plain)
        if _submits_after(parent):
            yield parent, _replacing(parent.args, 1, ast.Tuple([], ast.Load()))
        if isinstance(parent, ast.keyword) and parent.arg == "marks":
            yield parent.value, lambda keyword=parent: setattr(keyword, "value", ast.List([], ast.Load()))


def _replacing(values: list[Any], position: int, new: Any) -> Any:
    return lambda: values.__setitem__(position, new)


def _is_call(statement: Any) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)) or "policy" in ast.unparse(call.func):
        return False
    return call.func.attr in _CALLS


def _submits_after(node: Any) -> bool:
    """Whether work is submitted to a copy stream behind events."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "submit"):
        return False
    return len(node.args) > 1 and any(name in ast.unparse(node.args[1]) for name in ("after", "before", "copied"))


def _sets_event(statement: Any) -> bool:
    if not isinstance(statement, ast.Assign):
        return False
    return any(isinstance(target, ast.Attribute) and target.attr in _EVENTS for target in statement.targets)


def _locks(statement: Any) -> bool:
    return isinstance(statement, ast.With) and "_lock" in ast.unparse(statement.items[0].context_expr)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self._mutant.module else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self._mutant.source, f"mutant of {self._mutant.module}", "exec"), module.__dict__)


def is_caught(mutant: Mutant | None, tests: Sequence[Sequence[str]] = TESTS) -> bool:
    """Whether a test fails with a mutant (None: the code as it is), or never ends."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        import pytest

        fails = any(pytest.main(["-x", "-n", "0", "-p", "no:cacheprovider", *each]) for each in tests)
        os._exit(int(fails))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only mutants whose module, line or text has one of these"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    arguments = parser.parse_args()
    found = [
        mutant
        for module in MODULES
        for mutant in mutants(module)
        if any(text in f"{mutant.module}:{mutant.line} {mutant.what}" for text in arguments.only)
    ]
    if not arguments.list:
        # What every child needs is imported once; nothing of the library may be, so that mutants are.
        import hypothesis  # noqa: F401
        import numpy  # noqa: F401
        import torch
        import transformers  # noqa: F401

        torch.set_num_threads(1)
        os.chdir(ROOT)
        if is_caught(None):
            sys.exit("the tests fail without any change")
    caught = 0
    for mutant in found:
        verdict = "" if arguments.list else "caught " if is_caught(mutant) else "SURVIVES "
        caught += verdict == "caught "
        print(f"{verdict}{mutant.module}:{mutant.line} {mutant.what}", flush=True)
    if not arguments.list:
        print(f"{caught} of {len(found)} mutants are caught")


if __name__ == "__main__":
    main()
