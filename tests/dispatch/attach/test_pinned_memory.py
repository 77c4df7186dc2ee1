from __future__ import annotations

import torch

from bigmodel.devices import virtual
from bigmodel.devices.pinned import PAGE
from bigmodel.dispatch.attach.pinned_memory import PinnedBudget

CUDA = torch.device("cuda", 0)


def test_bytes_are_given_out_until_none_are_left() -> None:
    pinned = PinnedBudget(CUDA, 3 * PAGE)
    assert [pinned.take(nbytes) for nbytes in (2 * PAGE, 2 * PAGE, PAGE, 1)] == [True, False, True, False]


def test_bytes_are_counted_as_they_are_pinned_in_whole_pages() -> None:
    pinned = PinnedBudget(CUDA, 2**30)
    assert not pinned.take(2**30 + 1)
    assert pinned.take(2**28 + 1, 2**20 - 1)
    assert pinned.left == 2**30 - (2**28 + PAGE) - 2**20


def test_what_is_pinned_beyond_what_was_asked_for_must_fit_the_budget_of_the_host() -> None:
    pinned = PinnedBudget(CUDA, 2**20, spare=200)
    asked = (PAGE - 201, PAGE - 100, PAGE, 2 * PAGE - 100, PAGE - 1, 2 * PAGE)
    assert [pinned.take(nbytes) for nbytes in asked] == [False, True, True, True, False, True]


def test_for_a_device_that_wins_nothing_by_it_nothing_is_pinned() -> None:
    virtual.enable(count=1, strict=False)
    try:
        for device in ("cpu", "virtual:0"):
            assert not PinnedBudget(torch.device(device), 100).take(1)
    finally:
        virtual.disable()
