"""Tests that run on several processes over gloo.

A test decorated with `on_ranks` is a function that every process runs; `run_on_ranks` calls any function of a module
so. The processes are started when they are first needed and run one function after the other, each in new states;
after a failure the next function gets new ones.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.preloaded import Program

_CHECKS: dict[tuple[str, str], Callable[..., None]] = {}
_ROOT = Path(__file__).parents[2]
_LIMIT = 100.0  # seconds for one function


def on_ranks(check: Callable[..., None]) -> Callable[[], None]:
    """Run a test on two processes. It may take `folder`, a Path that all its processes share."""
    _CHECKS[check.__module__, check.__name__] = check
    takes_folder = "folder" in inspect.signature(check).parameters

    def test() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _run(check.__module__, check.__name__, [Path(folder)] if takes_folder else [], 2, ())

    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    test.__dict__.update(check.__dict__)  # marks
    return test


def run_on_ranks(
    function: Callable[..., None], *arguments: Any, processes: int = 2, modules: tuple[str, ...] = ()
) -> None:
    """Call a function of a module as every process of a run; the test fails where it fails in any of them.

    Args:
        arguments: texts, numbers, paths and lists of such.
        modules: what the processes have imported when they start, beside PyTorch; processes are shared by the functions
            that name the same.
    """
    _run(function.__module__, function.__name__, list(arguments), processes, modules)


def _run(module: str, name: str, arguments: list[Any], processes: int, modules: tuple[str, ...]) -> None:
    failures = _ranks(processes, modules).run({"module": module, "name": name, "arguments": _plain(arguments)})
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def _plain(arguments: list[Any]) -> list[Any]:
    return [{"path": str(each)} if isinstance(each, Path) else each for each in arguments]


class _Ranks:
    """The processes of one run, which read calls and write what came of them, one line each."""

    def __init__(self, processes: int, modules: tuple[str, ...]) -> None:
        command = ["-m", "tests.train.multiprocess"]
        self.processes = [Program(command, each, stdin=True, modules=modules) for each in _environments(processes)]
        atexit.register(self.stop)

    def run(self, call: dict[str, Any]) -> list[str]:
        """Return what failed. Afterwards the processes are as good as new, or stopped."""
        for process in self.processes:
            process.stdin.write(json.dumps(call) + "\n")
            process.stdin.flush()
        waiting = {process.stdout: rank for rank, process in enumerate(self.processes)}
        failures = []
        until = time.monotonic() + _LIMIT
        while waiting and not failures:
            ready, _, _ = select.select(list(waiting), [], [], max(until - time.monotonic(), 0))
            failures += [f"process {rank}: not finished" for rank in waiting.values() if not ready]
            for stream in ready:
                rank, line = waiting.pop(stream), stream.readline()
                failure = json.loads(line) if line else "ended: " + self.processes[rank].stderr.read()[-3000:]
                failures += [f"process {rank}: {failure}"] if failure else []
        if failures:
            self.stop()
        return failures

    def stop(self) -> None:
        """End the processes, if they have not ended."""
        atexit.unregister(self.stop)
        _ranks.cache_clear()
        for process in self.processes:
            process.kill()


@cache
def _ranks(processes: int, modules: tuple[str, ...]) -> _Ranks:
    return _Ranks(processes, modules)


def start_ranks(arguments: Sequence[object], processes: int = 2, **variables: str) -> list[Program]:
    """Start a program as every process of a run, and return at once."""
    return [Program(arguments, environment) for environment in _environments(processes, **variables)]


def run_script(arguments: Sequence[object], *, modules: Sequence[str] = (), **variables: str) -> str:
    """Run a script, ["-m", module, ...] or ["-c", code, ...] that has PyTorch imported already; return its output.

    The test fails where the script does. `modules` are those of `Program`.
    """
    process = Program(arguments, _environments(1, **variables)[0], modules=modules)
    try:
        out, err = process.communicate(timeout=_LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return out


def _environments(processes: int, **variables: str) -> list[dict[str, str]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    common = {**kept, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(_ROOT), **variables}
    common.setdefault("XDG_CONFIG_HOME", "/nonexistent")  # no configuration of the user's
    if processes == 1:
        return [common]
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def fresh_states() -> None:
    """Let the next Accelerator begin anew, in the process group there is."""
    from bigmodel.train import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def _serve() -> None:
    """Make the calls that come in, until no more do."""
    from bigmodel.train import PartialState

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the functions print
    PartialState(timeout=timedelta(seconds=_LIMIT))
    for line in sys.stdin:
        failure = _called(**json.loads(line))
        answers.write(json.dumps(failure) + "\n")
        answers.flush()
        if failure:
            os._exit(1)  # the processes are out of step: later calls would mean nothing


def _called(module: str, name: str, arguments: list[Any]) -> str:
    from bigmodel.train import PartialState

    loaded = import_module(module)
    function = _CHECKS.get((module, name)) or getattr(loaded, name)
    environment = dict(os.environ)
    fresh_states()
    try:
        function(*(Path(each["path"]) if isinstance(each, dict) else each for each in arguments))
        PartialState().wait_for_everyone()
    except BaseException:
        return traceback.format_exc()
    os.environ.clear()
    os.environ.update(environment)
    return ""


if __name__ == "__main__":
    # As the module that tests import, so that decorated functions are found in one place.
    import_module("tests.train.multiprocess")._serve()
