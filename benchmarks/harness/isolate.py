"""Runs work in a separate process: new memory, new allocator, only the work's own imports.

It is used for measurements that depend on a process's history: peak memory, first-touch page faults, patches of peers.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import BenchmarkError

TIMEOUT = 600.0


def import_folder() -> Path:
    """Return the folder that the top-level package of this module is imported from."""
    package = sys.modules[__name__.partition(".")[0]]
    assert package.__file__ is not None
    return Path(package.__file__).resolve().parent.parent


def run_isolated(function: Callable[..., Any], timeout: float = TIMEOUT, **arguments: Any) -> Any:
    """Call a function of a module in a fresh interpreter and return its result.

    Args:
        function: A top-level function of a module. Arguments and result must be plain data, as in JSON.
        timeout: Seconds after which the process is killed.
        arguments: Keyword arguments.

    Raises:
        BenchmarkError: The process failed; the message ends with the last line of its stderr, the cause has all of it.
        subprocess.TimeoutExpired: It took longer than `timeout`.
    """
    call = json.dumps({"module": function.__module__, "name": function.__qualname__, "arguments": arguments})
    with tempfile.TemporaryFile("w+") as answer:
        os.set_inheritable(answer.fileno(), True)
        command = [sys.executable, "-m", __name__, str(answer.fileno())]
        done = subprocess.run(
            command,
            input=call,
            timeout=timeout,
            capture_output=True,
            text=True,
            pass_fds=[answer.fileno()],
            env=environment_of_children(),
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise BenchmarkError(
                f"{function.__qualname__} failed in its own process (exit {done.returncode}): {last}"
            ) from RuntimeError(done.stderr)
        answer.seek(0)
        return json.load(answer)


def environment_of_children() -> dict[str, str]:
    """Return the environment in which another process imports this package from where it was imported here."""
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(import_folder()), *([given] if given else [])])}


def _main() -> None:
    call = json.load(sys.stdin)
    work: Any = importlib.import_module(call["module"])
    for part in call["name"].split("."):
        work = getattr(work, part)
    result = work(**call["arguments"])
    with os.fdopen(int(sys.argv[1]), "w", closefd=False) as answer:
        json.dump(result, answer)


if __name__ == "__main__":
    _main()
