"""Pinned memory, on every kind of accelerator."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from bigmodel.devices import accelerators
from bigmodel.devices.pinned import empty_weights, is_pinned, pinned_copy, pinned_weights
from bigmodel.devices.streams import compute_mark

pytestmark = pytest.mark.usefixtures("every_accelerator")


def device() -> torch.device:
    return torch.device(accelerators()[0])


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, 3 * 2**20 + 5])
def test_memory_of_weights_is_pinned_and_copied_from_and_to(nbytes: int) -> None:
    memory = empty_weights(nbytes, pin=True)
    memory.copy_(torch.arange(nbytes) % 251)
    expected = memory.clone()
    assert is_pinned(memory)
    assert is_pinned(memory[nbytes // 2 :])
    there = memory.to(device(), non_blocking=True)
    assert torch.equal(there.cpu(), expected)
    memory.zero_()
    memory.copy_(there, non_blocking=True)
    compute_mark(device()).synchronize()
    assert torch.equal(memory, expected)


def test_memory_of_weights_that_need_no_pinning_is_ordinary() -> None:
    assert not is_pinned(empty_weights(100, pin=False))
    assert empty_weights(0, pin=True).numel() == 0


def test_copies_in_pinned_memory_are_contiguous_and_equal() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    for copy in (pinned_copy, pinned_weights):
        copied = copy(tensor)
        assert is_pinned(copied)
        assert copied.is_contiguous()
        assert torch.equal(copied, tensor)


def test_a_view_keeps_the_memory_of_weights_and_the_last_one_gives_it_back(every_accelerator: str) -> None:
    if every_accelerator != "cuda":
        pytest.skip("needs CUDA: the resident set is the kernel's word for what is pinned")
    before = resident_bytes()
    view = empty_weights(64 * 2**20, pin=True)[5:10].fill_(3)
    assert resident_bytes() - before > 60 * 2**20
    assert view.to("cuda", non_blocking=True).tolist() == [3] * 5
    del view
    gc.collect()
    assert resident_bytes() - before < 20 * 2**20


def resident_bytes() -> int:
    with open(f"/proc/{os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
