from __future__ import annotations

import torch

from bigmodel.devices import virtual
from bigmodel.dispatch.attach.pinned_memory import PinnedBudget

CUDA = torch.device("cuda", 0)


def test_bytes_are_given_out_until_none_are_left() -> None:
    pinned = PinnedBudget(CUDA, 96)
    assert [pinned.take(nbytes) for nbytes in (64, 64, 32, 1)] == [True, False, True, False]


def test_bytes_are_counted_as_they_are_pinned_rounded_up_to_a_power_of_two() -> None:
    pinned = PinnedBudget(CUDA, 2**30)
    assert not pinned.take(2**30 + 1)
    assert pinned.take(2**28 + 1, 2**20 + 1)
    assert pinned.left == 2**30 - 2**29 - 2**21


def test_what_is_pinned_beyond_what_was_asked_for_must_fit_the_budget_of_the_host() -> None:
    pinned = PinnedBudget(CUDA, 1000, spare=20)
    assert [pinned.take(nbytes) for nbytes in (100, 110, 64, 127, 254, 126)] == [False, True, True, True, False, False]


def test_for_a_device_that_wins_nothing_by_it_nothing_is_pinned() -> None:
    virtual.enable(count=1, strict=False)
    try:
        for device in ("cpu", "virtual:0"):
            assert not PinnedBudget(torch.device(device), 100).take(1)
    finally:
        virtual.disable()
