"""A sample of the walk over PyTorch's operator database (`python -m tests.devices.virtual.opinfo`)."""

from __future__ import annotations

import pytest

from tests.devices.virtual import opinfo

SHARDS = 60
"""Of the database, each of the shards tested here is one in so many."""


@pytest.mark.slow
@pytest.mark.parametrize("shard", [0, 13])
def test_operations_compute_what_they_compute_on_the_cpu_or_are_refused(shard: int) -> None:
    names = [opinfo.name_of(operation) for operation in opinfo.operations()]
    found = dict(opinfo.results(list(range(shard, len(names), SHARDS))))
    failures = {names[number]: result for number, result in found.items() if result not in opinfo.PASSED}
    assert failures == {}
    assert len(found) >= len(names) // SHARDS
