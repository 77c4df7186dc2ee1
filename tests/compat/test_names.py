"""The modules that programs import from have the names of accelerate's, where that is installed."""

from __future__ import annotations

import pytest

from tests.preloaded import run

pytestmark = pytest.mark.slow  # a process that imports all of accelerate


def test_every_name_that_accelerate_defines_is_there_or_has_a_reason() -> None:
    pytest.importorskip("accelerate")
    done = run(["-m", "tests.compat.peers.names"])
    assert (done.returncode, "NO REASON" in done.stdout) == (0, False), done.stdout + done.stderr
    assert " 0 of these without a reason" in done.stdout
