"""What all tests share: one thread per operation, and virtual accelerators that come and go with a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from bigmodel.devices import virtual

torch.set_num_threads(1)


@pytest.fixture
def accelerators() -> Iterator[None]:
    """Two virtual accelerators without limits, empty at the start."""
    gc.collect()
    virtual.enable(count=2)
    yield
    gc.collect()
    virtual.disable()
