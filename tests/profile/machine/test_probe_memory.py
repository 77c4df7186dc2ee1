from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.memory import CachingMemory
from bigmodel.profile.machine.probe_memory import measured_caching


@pytest.fixture
def _two() -> Iterator[None]:
    yield
    virtual.enable(1)
    virtual.disable()


@pytest.mark.usefixtures("_two")
def test_the_workspace_is_what_the_first_product_of_a_stream_allocates() -> None:
    virtual.enable(1, strict=True, caching=virtual.Caching(context=300, workspace=5 * 2**20))
    warm = torch.ones(4, 4, device="virtual:0")
    _ = warm @ warm
    assert measured_caching(torch.device("virtual:0")) == CachingMemory(5 * 2**20, 300)


@pytest.mark.usefixtures("accelerators")
def test_nothing_is_measured_where_no_allocator_caches() -> None:
    assert measured_caching(torch.device("virtual:0")) is None
