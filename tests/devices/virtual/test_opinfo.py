"""A sample of the walk over PyTorch's operator database (`python -m tests.devices.virtual.opinfo`)."""

from __future__ import annotations

import pytest

from tests.devices.virtual import opinfo
from tests.preloaded import run

SAMPLE = list(range(7, 700, 116))
"""Positions of operations in the database, which has about 700."""


@pytest.mark.slow
def test_operations_compute_what_they_compute_on_the_cpu_or_are_refused() -> None:
    numbers = ",".join(map(str, SAMPLE))
    done = run(["-m", "tests.devices.virtual.opinfo", "--numbers", numbers])
    results = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(results) == len(SAMPLE)
    assert [
        (number, result) for number, result in zip(SAMPLE, results, strict=True) if result not in opinfo.PASSED
    ] == []
