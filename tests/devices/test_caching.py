"""Allocators that cache: their peaks, and limits of what they reserve."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from bigmodel.devices import reset_peak_memory, virtual
from bigmodel.devices.caching import (
    MemoryPeaks,
    hold_to,
    limit_reserved,
    memory_now,
    memory_peaks,
)

MiB = 2**20
DEVICE = "virtual:0"


@pytest.fixture(autouse=True)
def _caching() -> Iterator[None]:
    virtual.enable(1, caching=virtual.Caching(context=100, workspace=200))
    yield
    limit_reserved(DEVICE, None)
    virtual.enable(1)
    virtual.disable()


def filled(mebibytes: int) -> torch.Tensor:
    return torch.ones(mebibytes * MiB, dtype=torch.uint8, device=DEVICE)


def test_peaks_are_of_tensors_their_blocks_and_their_segments() -> None:
    reset_peak_memory(DEVICE)
    held = torch.ones(1000, dtype=torch.uint8, device=DEVICE)
    peaks = MemoryPeaks(requested=1000, allocated=1024, reserved=2 * MiB)
    assert memory_peaks(DEVICE) == memory_now(DEVICE) == peaks
    del held
    assert memory_peaks(DEVICE) == peaks
    assert memory_now(DEVICE) == MemoryPeaks(0, 0, 2 * MiB), "its segment is cached"
    assert peaks.beyond(memory_now(DEVICE)) == MemoryPeaks(1000, 1024, 0)


@pytest.mark.usefixtures("accelerators")
def test_without_a_caching_allocator_the_peaks_are_one_number() -> None:
    virtual.enable(2)
    virtual.disable()
    virtual.enable(1)
    reset_peak_memory(DEVICE)
    held = torch.ones(1000, dtype=torch.uint8, device=DEVICE)
    assert memory_peaks(DEVICE) == MemoryPeaks(held.nbytes, held.nbytes, held.nbytes)


def test_an_allocator_at_its_limit_gives_cached_memory_back_before_it_takes_more() -> None:
    for limit, reserved in ((None, 26 * MiB), (20 * MiB, 14 * MiB)):
        limit_reserved(DEVICE, limit)
        for size in (12, 14):
            filled(size)
        assert memory_now(DEVICE).reserved == reserved
        torch.get_device_module("virtual").empty_cache()
    held = filled(12)
    with pytest.raises(torch.OutOfMemoryError):
        filled(14)
    assert held.nbytes == 12 * MiB


def test_limits_add_up_beside_what_was_reserved_before_and_are_taken_back() -> None:
    before = filled(12)
    first, second = hold_to(DEVICE, 10 * MiB), hold_to(DEVICE, 14 * MiB)
    held = [filled(10), filled(14)]
    with pytest.raises(torch.OutOfMemoryError):
        filled(10)
    del held[:]
    first()
    first()
    torch.get_device_module("virtual").empty_cache()
    held = [filled(14)]
    with pytest.raises(torch.OutOfMemoryError):
        filled(10)
    second()
    held.append(filled(40))
    assert memory_now(DEVICE).allocated >= before.nbytes
    del held
    gc.collect()
