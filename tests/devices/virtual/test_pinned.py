"""Pinned memory of virtual accelerators."""

from __future__ import annotations

import sys

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.pinned import empty_host, empty_weights, is_pinned, pinned_copy, registered_bytes
from bigmodel.devices.virtual.pinned import PinnedMemory, pinned_bytes

from ...dispatch.interrupting import interrupted_at

pytestmark = pytest.mark.usefixtures("accelerators")


@pytest.mark.parametrize(("nbytes", "pinned"), [(0, 0), (1, 1), (512, 512), (513, 1024), (2**30 + 1, 2**31)])
def test_bytes_are_rounded_up_to_a_power_of_two(nbytes: int, pinned: int) -> None:
    assert pinned_bytes(nbytes) == pinned


def test_what_is_pinned_is_known_and_rounded_up_to_a_power_of_two() -> None:
    before = virtual.pinned_memory.reserved, virtual.pinned_memory.requested
    memory = empty_host(5000, pin=True)
    assert memory.data_ptr() % 4096 == 0
    assert is_pinned(memory[100:200].view(10, 10))
    assert not is_pinned(torch.empty(8))
    assert virtual.pinned_memory.reserved - before[0] == 8192
    assert virtual.pinned_memory.requested - before[1] == 5000
    del memory
    assert (virtual.pinned_memory.reserved, virtual.pinned_memory.requested) == before


def test_memory_of_weights_is_rounded_up_to_pages_only() -> None:
    before = virtual.pinned_memory.reserved
    memory = empty_weights(5 * 4096 + 1, pin=True)
    assert is_pinned(memory)
    assert len(memory) == 5 * 4096 + 1
    assert virtual.pinned_memory.reserved - before == registered_bytes(len(memory)) == 6 * 4096


def test_a_copy_in_pinned_memory_is_contiguous_and_equal() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    copied = pinned_copy(tensor)
    assert is_pinned(copied)
    assert copied.is_contiguous()
    assert torch.equal(copied, tensor)


def test_an_interrupt_loses_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's allocator is not interrupted."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    number, interrupted = 0, True
    while interrupted:
        memory = PinnedMemory()
        number += 1

        def use(memory: PinnedMemory = memory) -> None:
            held = [memory.empty(100 * size) for size in range(3)]
            assert memory.holds(held[1])
            del held[1]
            held.append(memory.empty(700))

        interrupted = interrupted_at(number - 1, use)
        assert (memory.requested, memory.reserved) == (0, 0), number
        kept = memory.empty(5)
        assert memory.holds(kept)
        assert (memory.requested, memory.reserved) == (5, 8), number
        del kept
    assert number > 20
