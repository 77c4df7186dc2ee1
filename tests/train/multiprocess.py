"""Tests that run on several processes over gloo.

A test decorated with `on_ranks` is a function that every process runs. All such tests of a module run one after the
other in the same processes, which are started when the first of them is asked for.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
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
        launch([sys.executable, "-m", "tests.train.multiprocess", module, folder], processes=2)
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


def start(command: list[str], processes: int, **variables: str) -> list[subprocess.Popen[str]]:
    """Start a command as every process of a run."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(_ROOT), **variables}
    return [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=_ROOT,
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


def _run_checks(module: str, folder: Path) -> None:
    from bigmodel.train import PartialState

    state = PartialState(timeout=timedelta(seconds=30))
    import_module(module)
    for name, check in _CHECKS[module].items():
        fresh_states()
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
            sys.exit(1)  # the processes are out of step: later checks would mean nothing
    state.destroy_process_group()


if __name__ == "__main__":
    # As the module that tests import, so that decorated functions are found in one place.
    import_module("tests.train.multiprocess")._run_checks(sys.argv[1], Path(sys.argv[2]))
