"""The modules that programs import from have the names of accelerate's, where that is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .answers import ROOT

pytestmark = pytest.mark.slow  # an interpreter that imports accelerate


def test_every_name_that_accelerate_defines_is_there_or_has_a_reason() -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "tests.compat.peers.names"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "NO REASON" in done.stdout) == (0, False), done.stdout + done.stderr
    assert " 0 of these without a reason" in done.stdout
