"""Starting `bigmodel launch` from a test, as a user would from a shell."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from tests.preloaded import ROOT as ROOT
from tests.preloaded import Program, python_executable


def start_launch(*arguments: object, **options: Any) -> Program:
    """Begin `bigmodel launch ARGUMENTS`, with one CPU thread for each process, and return at once.

    The launcher itself has PyTorch imported already; the processes it starts are interpreters of their own, unless
    `fork_ranks` is true. The options are those of `start_command`.
    """
    return start_command("launch", *arguments, **options)


def start_command(
    *arguments: object, env: dict[str, str] | None = None, fork_ranks: bool = False, **options: Any
) -> Program:
    """Begin `bigmodel ARGUMENTS`, and return at once.

    Args:
        env: variables to set.
        fork_ranks: whether the processes that torch's agent starts have PyTorch imported already, too.
        options: of `Program`.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    environment = {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": "/nonexistent",
        "HF_HOME": "/nonexistent",
        **({"PYTHON_EXEC": str(python_executable())} if fork_ranks else {}),
        **(env or {}),
    }
    return Program(["-m", "bigmodel.cli.main", *arguments], environment, **options)


def launched(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `bigmodel launch ARGUMENTS` to its end, with the options of `start_command`."""
    return ended(start_launch(*arguments, **options))


def ended(process: Program) -> subprocess.CompletedProcess[str]:
    """Return what a command has written, and its exit code."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
