"""What all tests share: one thread per operation, and virtual accelerators that come and go with a test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, settings

from bigmodel.devices import accelerators as accelerator_names
from bigmodel.devices import memory_allocated, virtual

from .accelerators import KINDS, skip_what_is_missing

torch.set_num_threads(1)
# A failing example is printed as it was found. Making it smaller takes minutes: `--hypothesis-profile=shrink` does it.
settings.register_profile("shrink", settings.get_profile("default"), print_blob=True)
settings.register_profile("fast", phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)])
settings.load_profile("fast")
# Modules of tests name virtual devices before any test runs: the device type must be registered by then.
virtual.enable(count=2)
virtual.disable()


def pytest_collection_finish() -> None:
    """What is there before the first test stays: the many collections that tests ask for need not look at it."""
    gc.collect()
    gc.freeze()


def _release_accelerators() -> None:
    """Collect what earlier tests left on accelerators in reference cycles; a collection is dear, so only then."""
    if any(memory_allocated(index) for index in range(len(accelerator_names()))):
        gc.collect()


@pytest.fixture
def accelerators() -> Iterator[None]:
    """Two virtual accelerators without limits, empty at the start."""
    virtual.enable(count=2)
    _release_accelerators()
    yield
    _release_accelerators()
    virtual.disable()


@pytest.fixture(params=KINDS)
def every_accelerator(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kind of accelerator in turn, empty at the start: two virtual ones without limits, and CUDA's if present."""
    skip_what_is_missing(request.param, request.node)
    if request.param == "virtual":
        request.getfixturevalue("accelerators")
    _release_accelerators()
    yield request.param
    _release_accelerators()
