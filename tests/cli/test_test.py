"""`bigmodel test`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigmodel.cli.main import run

ROOT = Path(__file__).parents[2]


def test_no_process_checks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["test", "--num_processes", "0"]) == 2
    assert "num_processes" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_right_configuration_passes(processes: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": "/nonexistent"}
    command = [sys.executable, "-m", "bigmodel.cli.main", "test", "--cpu", "--num_processes", processes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Processes: {processes} " in done.stdout
    assert done.stdout.splitlines()[-1] == "The configuration works."
