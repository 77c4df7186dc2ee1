from __future__ import annotations

import torch

from bigmodel.devices import virtual
from bigmodel.dispatch.attach.pinned_memory import PinnedBudget

CUDA = torch.device("cuda", 0)


def test_bytes_are_given_out_until_none_are_left() -> None:
    pinned = PinnedBudget(CUDA, 100)
    assert [pinned.take(nbytes) for nbytes in (60, 60, 40, 1)] == [True, False, True, False]


def test_for_a_device_that_wins_nothing_by_it_nothing_is_pinned() -> None:
    virtual.enable(count=1, strict=False)
    try:
        for device in ("cpu", "virtual:0"):
            assert not PinnedBudget(torch.device(device), 100).take(1)
    finally:
        virtual.disable()
