"""A plugin of pytest: backward passes on virtual accelerators run in PyTorch's own thread, as those on a GPU do.

    python -m pytest -p tests.engine_threads tests/dispatch tests/train

PyTorch has such a thread for `virtual:0` alone: tests that use another device are run as always.
"""

from __future__ import annotations

import threading

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.devices.virtual import tensor


@pytest.fixture(autouse=True)
def engine_threads() -> None:
    """Let the test's backward passes run in PyTorch's threads, also if the one before kept its own to itself."""
    torch.autograd.set_multithreading_enabled(True)


def _create_threads() -> None:
    """Have autograd create its threads, which it does at the first backward pass of a process."""
    used: list[threading.Thread] = []
    virtual.enable(count=1)
    leaf = torch.ones(1, device="virtual:0", requires_grad=True)
    leaf.register_hook(lambda _gradient: used.append(threading.current_thread()))
    leaf.sum().backward()
    virtual.disable()
    if used == [threading.current_thread()]:
        raise pytest.UsageError("autograd has no thread for virtual:0: a backward pass had been run before")


tensor.with_engine_thread.add(0)
_create_threads()
