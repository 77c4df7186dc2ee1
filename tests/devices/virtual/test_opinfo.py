"""A sample of the walk over PyTorch's operator database (`python -m tests.devices.virtual.opinfo`)."""

from __future__ import annotations

import pytest

from tests.devices.virtual import opinfo

SHARDS = 120
"""Of the database, each of the shards tested here is one in so many."""


@pytest.mark.slow
def test_operations_compute_what_they_compute_on_the_cpu_or_are_refused() -> None:
    names = [opinfo.name_of(operation) for operation in opinfo.operations()]
    sample = [number for number in range(len(names)) if number % SHARDS in (0, 13)]
    found = dict(opinfo.results(sample))
    failures = {names[number]: result for number, result in found.items() if result not in opinfo.PASSED}
    assert failures == {}
    assert len(found) == len(sample)
