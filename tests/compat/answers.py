"""Running a program of `programs` and reading its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.preloaded import run

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
ALONE = "tests.compat.alone"
"""The prelude of programs under the stand-in where there is no accelerate."""


def answers(program: str, *arguments: str, before: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """Run ``python BEFORE... PROGRAM ARGUMENTS...`` in a new interpreter and return its answers by question."""
    path = PROGRAMS / f"{program}.py"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *before, str(path), *arguments]
    done = subprocess.run(command, env={**variables, **environment}, capture_output=True, text=True, timeout=300)
    return read_answers(done)


def preloaded_answers(
    program: str, *, prelude: str = ALONE, modules: Sequence[str] = (), **environment: str
) -> dict[str, Any]:
    """Run a program that has its libraries imported already, under the stand-in, and return its answers by question.

    Args:
        prelude: that of `tests.preloaded.Program`; "": the program runs with the accelerate that is installed.
        modules: likewise.
    """
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment}
    return read_answers(run([PROGRAMS / f"{program}.py"], variables, prelude=prelude, modules=modules))


def read_answers(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the answers of a program that has ended. The test fails where the program does."""
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
