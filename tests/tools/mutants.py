"""Takes out one piece of synchronisation at a time, and looks whether a test fails.

    python -m tests.tools.mutants [--stand-in] [--only TEXT ...] [--shard I/N] [--results FILE] [--list]

A mutant lacks one wait, one event that is recorded, asked or waited for, one thing said to the allocator, or one lock,
in the modules that move weights and batches; with --stand-in in those of the virtual accelerators, where it may also
lack one thing that the race detector notes or looks at. Each runs in a forked process, which imports the mutant instead
of the module. A line is printed for each, with the test that fails; the last line is the score. A run that ends early
goes on where it ended if it is given the same file of results; several shards may share one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "bigmodel.checkpoint.upload",
    "bigmodel.devices.streams",
    "bigmodel.devices.empty",
    "bigmodel.dispatch.attach.activation_guard",
    "bigmodel.dispatch.attach.additions",
    "bigmodel.dispatch.attach.host_or_device",
    "bigmodel.dispatch.attach.outside_calls",
    "bigmodel.dispatch.mapped.readahead",
    "bigmodel.dispatch.transfer.disk_reader",
    "bigmodel.dispatch.transfer.fetcher",
    "bigmodel.dispatch.transfer.files",
    "bigmodel.dispatch.transfer.page_cache",
    "bigmodel.dispatch.transfer.quantized_transfer",
    "bigmodel.dispatch.transfer.read_job",
    "bigmodel.dispatch.transfer.speculative_reads",
    "bigmodel.dispatch.transfer.staging",
    "bigmodel.dispatch.transfer.to_host",
    "bigmodel.dispatch.streaming.slots",
    "bigmodel.dispatch.streaming.streamer",
    "bigmodel.dispatch.experts.cache",
    "bigmodel.dispatch.experts.lazy_tensors",
    "bigmodel.dispatch.weights.visits",
    "bigmodel.train.data.steps",
)
TESTS: tuple[tuple[str, ...], ...] = (
    ("tests/checkpoint/test_upload.py", "tests/dispatch/transfer/test_to_host.py"),
    ("tests/dispatch/test_locks.py", "tests/dispatch/test_strict.py"),
    ("-m", "not slow", *(f"tests/dispatch/{room}" for room in ("streaming", "transfer", "experts"))),
    ("-m", "not slow", "tests/devices/test_streams.py", "tests/dispatch/test_dispatch.py"),
)
"""Arguments of pytest, one call after another until one fails; the tests of the mutant's own module come before."""

STAND_IN = tuple(
    f"bigmodel.devices.virtual.{name}"
    for name in ("arena", "host_copies", "late", "link", "pinned", "races", "strict", "streams")
)
"""The modules of the virtual accelerators that have streams, events, locks and the race detector."""

STAND_IN_TESTS: tuple[tuple[str, ...], ...] = (
    tuple(
        f"tests/devices/virtual/test_{name}.py"
        for name in ("punished", "streams", "races", "late", "locks", "arena", "pinned", "link", "backend")
    ),
    ("-m", "not slow", "tests/dispatch/test_strict.py", "tests/devices/test_streams.py"),
)

SECONDS = 240
"""After so long a mutant counts as caught: it hangs. The tests take half a minute on an idle machine."""

_CALLS = {
    *("wait", "synchronize", "wait_event", "uses", "record_stream", "record", "mark", "notify_all"),
    *("await_arrival", "result"),
}
"""Methods whose call is taken out, where it is a statement of its own."""

_EVENTS = {"drained", "restored", "marks", "ready"}
"""Attributes that hold events: an assignment to one is taken out."""


_STAND_IN_CALLS = {
    *("catch_up", "check", "check_watched", "check_written", "clear", "delay", "delay_compute", "finish", "finish_all"),
    *("forget", "freed", "joined", "launch", "late_arrival", "run_delayed", "wait_stream", "watch", "when_done"),
    *("_add_range", "_add_ranges", "_add_rows", "_check", "_delay", "_finish", "_free", "_free_ended"),
    *("_leave_for_host", "_queue", "_read", "_write", "_poison", "delayed_copy", "set_schedule"),
}
"""Functions and methods of the virtual accelerators, likewise."""

_NOTES = {"users", "reads", "writes", "torn", "used", "_watched", "_arrivals"}
"""What they note of accesses: an assignment to one, or into one, is taken out."""


class Mutant(NamedTuple):
    """One change: the module, the line, what is taken out, and the source without it."""

    module: str
    line: int
    what: str
    source: str


class Wanted(NamedTuple):
    """What is taken out beside asked events and locks.

    Attributes:
        calls: Names of functions and methods whose calls are, where they are statements of their own.
        notes: Names to which, or into which, assignments are.
    """

    calls: frozenset[str]
    notes: frozenset[str] = frozenset()


def mutants(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    wanted = Wanted(frozenset(_CALLS))
    if module in STAND_IN:
        wanted = Wanted(frozenset(_CALLS | _STAND_IN_CALLS), frozenset(_NOTES))
    text = _path(module).read_text()
    for number in range(sum(1 for _ in _places(ast.parse(text), wanted))):
        tree = ast.parse(text)
        node, change = list(_places(tree, wanted))[number]
        before = ast.unparse(node).splitlines()[0]
        change()
        yield Mutant(module, node.lineno, before, ast.unparse(ast.fix_missing_locations(tree)))


def _path(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def _places(tree: ast.AST, wanted: Wanted) -> Iterator[tuple[Any, Any]]:
    """Yield statements and calls that synchronise, each with a function that takes it out."""
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                for position, statement in enumerate(value):
                    if _is_call(statement, wanted.calls) or _sets_event(statement, wanted.notes):
                        yield statement, _replacing(value, position, ast.Pass())
                    elif _locks(statement):
                        plain = ast.If(ast.Constant(True), statement.body, [])
                        yield statement, _replacing(value, position, plain)
            if isinstance(value, ast.AST) and _asks(value):
                yield value, partial(setattr, parent, name, ast.Constant(True))
            elif isinstance(value, list):
                for position, each in enumerate(value):
                    if _asks(each):
                        yield each, _replacing(value, position, ast.Constant(True))
        if _submits_after(parent):
            yield parent, _replacing(parent.args, 1, ast.Tuple([], ast.Load()))
        if isinstance(parent, ast.keyword) and parent.arg == "marks":
            yield parent.value, lambda keyword=parent: setattr(keyword, "value", ast.List([], ast.Load()))


def _replacing(values: list[Any], position: int, new: Any) -> Any:
    return lambda: values.__setitem__(position, new)


def _is_call(statement: Any, calls: frozenset[str]) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
        return call.func.id == "wait" or call.func.id in calls - _CALLS
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)) or "policy" in ast.unparse(call.func):
        return False
    return call.func.attr in calls


def _asks(node: Any) -> bool:
    """Whether an event is asked if it has passed, whose answer is then taken to be yes."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("done", "query")


def _submits_after(node: Any) -> bool:
    """Whether work is submitted to a copy stream behind events."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "submit"):
        return False
    return len(node.args) > 1 and any(
        name in ast.unparse(node.args[1]) for name in ("after", "before", "copied", "free")
    )


def _sets_event(statement: Any, notes: frozenset[str]) -> bool:
    if not isinstance(statement, ast.Assign):
        return False
    if any(isinstance(target, ast.Attribute) and target.attr in _EVENTS for target in statement.targets):
        return True
    is_first = isinstance(statement.value, ast.Constant) and not statement.value.value
    return not is_first and any(_name(target) in notes for target in statement.targets)


def _name(target: ast.expr) -> str:
    """Return the last name of what is assigned to or into; none for a variable."""
    if isinstance(target, ast.Attribute):
        return target.attr
    into = target.value if isinstance(target, ast.Subscript) else None
    return _name(into) if isinstance(into, ast.Attribute) else into.id if isinstance(into, ast.Name) else ""


def _locks(statement: Any) -> bool:
    if not isinstance(statement, ast.With):
        return False
    context = ast.unparse(statement.items[0].context_expr)
    return "_lock" in context or context in ("self.lock", "detector.lock") or "self._to_device" in context


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self._mutant.module else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        # The race detector names places in the program, which those in its own files are not.
        module.__file__ = str(_path(self._mutant.module))
        exec(compile(self._mutant.source, module.__file__, "exec"), module.__dict__)


class _FirstFailure:
    """Writes the name of the first test that fails to a file; a plugin of pytest."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._written = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._written:
            self._written = True
            os.write(self._file, report.nodeid.encode())


def fails(mutant: Mutant | None, tests: Sequence[Sequence[str]] = TESTS) -> str | None:
    """Return what fails with a mutant (None: the code as it is): a test's name, "hangs" or "ends"; None if all pass."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        import pytest

        options = ("-x", "-n", "0", "-p", "no:cacheprovider")
        failed = any(pytest.main([*options, *each], [_FirstFailure(writer)]) for each in _tests(mutant, tests))
        os._exit(int(failed))
    os.close(writer)
    with open(reader) as failures:
        how = _await(child)
        with contextlib.suppress(ProcessLookupError):  # what its tests have started holds the pipe
            os.killpg(child, signal.SIGKILL)
        return (failures.read() or how) if how == "ends" else how


def _tests(mutant: Mutant | None, tests: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Yield arguments of pytest: the file of tests that mirrors the mutant's module first."""
    if mutant is not None:
        *rooms, name = mutant.module.split(".")[1:]
        mirror = Path("tests", *rooms, f"test_{name}.py")
        if mirror.exists():
            yield "-m", "not slow", str(mirror)
    yield from tests


def _await(child: int) -> str | None:
    """Wait for a process: None if it exits with 0, "ends" with another status, "hangs" if it had to be killed."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "ends" if status else None
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true", help="mutants of the virtual accelerators themselves")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only mutants whose module, line or text has one of these"
    )
    parser.add_argument("--shard", default="1/1", help="which part of how many, such as 2/4")
    parser.add_argument("--results", type=Path, help="file to add lines to; mutants that are in it are not tried again")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    arguments = parser.parse_args()
    shard, shards = map(int, arguments.shard.split("/"))
    modules, tests = (STAND_IN, STAND_IN_TESTS) if arguments.stand_in else (MODULES, TESTS)
    names = {f"{mutant.module}:{mutant.line} {mutant.what}": mutant for module in modules for mutant in mutants(module)}
    chosen = [name for name in names if any(text in name for text in arguments.only)][shard - 1 :: shards]
    if arguments.list:
        print("\n".join(chosen))
        return
    kept = arguments.results.read_text().splitlines() if arguments.results and arguments.results.exists() else []
    lines = [line for line in kept if line.split("\t")[1] in chosen]
    waiting = [name for name in chosen if name not in {line.split("\t")[1] for line in lines}]
    # What every child needs is imported once; nothing of the library may be, so that mutants are.
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    os.chdir(ROOT)
    if waiting and (failed := fails(None, tests)):
        sys.exit(f"the tests fail without any change: {failed}")
    for name in waiting:
        failed = fails(names[name], tests)
        lines.append("\t".join(("caught" if failed else "SURVIVES", name, failed or "")))
        print(lines[-1], flush=True)
        if arguments.results:
            with arguments.results.open("a") as results:
                results.write(lines[-1] + "\n")
    caught = sum(line.startswith("caught") for line in lines)
    print(f"{caught} of {len(chosen)} mutants are caught")


if __name__ == "__main__":
    main()
