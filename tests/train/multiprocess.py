"""Tests that run on several processes over gloo.

A test decorated with `on_ranks` is a function that every process runs. All such tests of a module run one after the
other when the first of them is asked for, and all modules run in the same two processes. These are started when they
are first needed; after a failure the next module gets new ones.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import select
import socket
import subprocess
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

_CHECKS: dict[str, dict[str, Callable[..., None]]] = {}
_ROOT = Path(__file__).parents[2]


def on_ranks(check: Callable[..., None]) -> Callable[[], None]:
    """Run a test on two processes. It may take `folder`, a Path that all its processes share."""
    _CHECKS.setdefault(check.__module__, {})[check.__name__] = check

    def test() -> None:
        failure = _outcomes(check.__module__)[check.__name__]
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return test


@cache
def _outcomes(module: str) -> dict[str, str | None]:
    with tempfile.TemporaryDirectory() as folder:
        _ranks().run(module, folder)
        outcomes: dict[str, str | None] = {}
        for name in _CHECKS[module]:
            reports = [Path(folder) / f"{name}.{rank}.json" for rank in range(2)]
            failures = [
                f"process {rank}: " + (json.loads(report.read_text()) if report.exists() else "not finished")
                for rank, report in enumerate(reports)
                if not report.exists() or json.loads(report.read_text())
            ]
            outcomes[name] = "\n".join(failures) if failures else None
        return outcomes


class _Ranks:
    """Two processes of one run, which take the names of modules and run their checks."""

    def __init__(self) -> None:
        self.answers, writing = zip(*(os.pipe() for _ in range(2)))
        command = [sys.executable, "-m", "tests.train.multiprocess"]
        self.processes = start(command, 2, pass_fds=writing, stdin=subprocess.PIPE, ANSWERS=json.dumps(writing))
        for descriptor in writing:
            os.close(descriptor)
        atexit.register(self.stop)

    def run(self, module: str, folder: str) -> None:
        """Run the checks of a module; afterwards the processes are as good as new, or stopped."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{module}\t{folder}\n")
            process.stdin.flush()
        waiting = dict.fromkeys(self.answers)
        until = time.monotonic() + 100
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(until - time.monotonic(), 0))
            if not ready or not all(os.read(descriptor, 1) for descriptor in ready):
                self.stop()
                return
            for descriptor in ready:
                del waiting[descriptor]

    def stop(self) -> None:
        """End the processes, if they have not ended."""
        atexit.unregister(self.stop)
        _ranks.cache_clear()
        for process in self.processes:
            process.kill()
            process.communicate()
        for descriptor in self.answers:
            os.close(descriptor)


@cache
def _ranks() -> _Ranks:
    return _Ranks()


def launch(command: list[str], processes: int, timeout: float = 100, **variables: str) -> list[str]:
    """Run a command as every process of a run; return their outputs. The end of one by an error ends all."""
    running = start(command, processes, **variables)
    try:
        return [process.communicate(timeout=timeout)[0] for process in running]
    except subprocess.TimeoutExpired:
        return ["timed out"]
    finally:
        for process in running:
            process.kill()
            process.wait()


def start(
    command: list[str], processes: int, pass_fds: Sequence[int] = (), stdin: int | None = None, **variables: str
) -> list[subprocess.Popen[str]]:
    """Start a command as every process of a run."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(_ROOT), **variables}
    return [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=stdin,
            stdout=subprocess.DEVNULL if pass_fds else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=_ROOT,
            pass_fds=pass_fds,
        )
        for rank in range(processes)
    ]


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def fresh_states() -> None:
    """Let the next Accelerator begin anew, in the process group there is."""
    from bigmodel.train import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def _serve() -> None:
    """Run the checks of the modules whose names come in, until no more do."""
    from bigmodel.train import PartialState

    state = PartialState(timeout=timedelta(seconds=30))
    own, *others = sorted(json.loads(os.environ["ANSWERS"]), key=lambda fd: fd != _answer_of(state.process_index))
    for descriptor in others:
        os.close(descriptor)  # so that the end of the other process is seen
    for line in sys.stdin:
        module, folder = line.rstrip("\n").split("\t")
        _run_checks(module, Path(folder))
        os.write(own, b".")
    state.destroy_process_group()


def _answer_of(rank: int) -> int:
    return int(json.loads(os.environ["ANSWERS"])[rank])


def _run_checks(module: str, folder: Path) -> None:
    from bigmodel.train import PartialState

    import_module(module)
    environment = dict(os.environ)
    for name, check in _CHECKS[module].items():
        fresh_states()
        state = PartialState()
        shared = folder / name
        shared.mkdir(exist_ok=True)
        arguments: dict[str, Any] = {"folder": shared} if "folder" in inspect.signature(check).parameters else {}
        failure = ""
        try:
            check(**arguments)
            state.wait_for_everyone()
        except BaseException:
            failure = traceback.format_exc()
        (folder / f"{name}.{state.process_index}.json").write_text(json.dumps(failure))
        if failure:
            os._exit(1)  # the processes are out of step: later checks would mean nothing
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    # As the module that tests import, so that decorated functions are found in one place.
    import_module("tests.train.multiprocess")._serve()
