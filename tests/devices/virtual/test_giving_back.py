"""Memory of virtual accelerators goes back to the host beside the program, and what somebody still reads stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bigmodel.devices import memory_allocated, virtual
from bigmodel.devices.virtual.giving_back import GivingBack, giving_back

MANY = 64 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait(giving: GivingBack) -> None:
    while not giving.done:
        time.sleep(0.001)


def test_a_freed_tensor_counts_no_more_at_once_and_its_pages_go_back(accelerators: None) -> None:
    virtual.enable(1, strict=False)
    tensor = torch.ones(MANY // 4, device=torch.device(virtual.TYPE, 0))
    taken = resident()
    del tensor
    assert memory_allocated(0) == 0
    wait(giving_back)
    assert resident() < taken - MANY * 3 // 4


def test_pages_go_back_before_the_storage_is_freed() -> None:
    """While its address is given up with Python's lock held, there is nothing left that takes long."""
    giving = GivingBack()
    storage = torch.ones(MANY // 4).untyped_storage()
    taken = resident()
    giving._waiting.append(storage)
    del storage
    giving._give_back()
    assert resident() < taken - MANY * 3 // 4
    assert giving.done


def test_what_somebody_holds_keeps_its_content() -> None:
    giving = GivingBack()
    tensor = torch.ones(MANY // 4)
    giving.take(tensor.untyped_storage())
    wait(giving)
    assert tensor.eq(1).all()


@pytest.mark.slow
def test_memory_of_others_keeps_its_content() -> None:
    giving = GivingBack()
    array = np.ones(MANY // 4, dtype=np.float32)
    giving.take(torch.from_numpy(array).untyped_storage())
    wait(giving)
    assert (array == 1).all()


@pytest.mark.slow
def test_a_forked_child_has_a_thread_of_its_own() -> None:
    giving = GivingBack()
    giving._worker = os.getpid()  # as if the parent's thread was at work
    storage = torch.empty(MANY // 4).untyped_storage()
    child = os.fork()
    if not child:
        giving.take(storage)
        wait(giving)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
