"""Starting `bigmodel launch` from a test, as a user would from a shell."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start_launch(*arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Begin `bigmodel launch ARGUMENTS`, with one CPU thread for each process, and return at once."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    environment = {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "XDG_CONFIG_HOME": "/nonexistent",
        "HF_HOME": "/nonexistent",
        **(env or {}),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "bigmodel.cli.main", "launch", *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `bigmodel launch ARGUMENTS` to its end."""
    process = start_launch(*arguments, env=env)
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
