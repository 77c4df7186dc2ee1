"""Which of several slots is overwritten first."""

from __future__ import annotations

import torch

from bigmodel.dispatch.block import Block
from bigmodel.dispatch.slot import Slot, least_wanted


def slot(last_use: int, name: str | None = None) -> Slot:
    return Slot(torch.empty(0), content=None if name is None else Block(name, []), last_use=last_use)


def test_an_empty_slot_comes_first_however_lately_it_was_used() -> None:
    empty = slot(9)
    assert least_wanted([slot(1, "a"), empty, slot(2, "b")]) is empty


def test_of_full_slots_the_one_wanted_longest_ago_comes_first() -> None:
    oldest = slot(1, "a")
    assert least_wanted([slot(3, "b"), oldest, slot(2, "c")]) is oldest


def test_slots_of_equal_content_are_two() -> None:
    assert slot(1) != slot(1)
