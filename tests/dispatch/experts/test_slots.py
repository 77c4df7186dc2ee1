"""Which expert lies in which slot, and which slot is overwritten next."""

from __future__ import annotations

import torch

from bigmodel.devices.streams import PAST, PastEvent
from bigmodel.dispatch.experts.policy import ExpertPolicy
from bigmodel.dispatch.experts.slots import ExpertSlots


def slots(count: int = 3, layers: int = 2, experts: int = 4) -> ExpertSlots:
    return ExpertSlots(torch.zeros(count, 8, dtype=torch.uint8), ExpertPolicy(layers, experts))


def put(made: ExpertSlots, *keys: tuple[int, int]) -> None:
    for key in keys:
        (slot,) = made.overwritable(1, (), ()) or ()
        made.fill(slot, key, (0, 0), lambda memory, after: PAST)
        made.placed(key, slot)


def test_an_expert_in_a_slot_is_found_until_it_is_forgotten() -> None:
    made = slots()
    put(made, (0, 1))
    slot = made.find((0, 1), (0, 0))
    assert slot is not None
    assert (0, 1) in made
    made.forget(slot)
    assert (0, 1) not in made
    assert made.find((0, 1), (0, 0)) is None


def test_an_expert_changed_on_the_host_is_found_only_while_in_use() -> None:
    made = slots()
    put(made, (0, 1))
    made.users[0] += 1
    assert made.find((0, 1), (0, 9)) is made[0]
    made.users[0] -= 1
    assert made.find((0, 1), (0, 9)) is None


def test_empty_slots_come_first_and_those_in_use_never() -> None:
    made = slots()
    put(made, (0, 0), (0, 1))
    assert made.overwritable(1, (), ()) == [made[2]]
    made.users[2] += 1
    assert made.free == 2
    assert set(map(id, made.overwritable(2, (), ()) or ())) == {id(made[0]), id(made[1])}
    assert made.overwritable(3, (), ()) is None


def test_kept_experts_are_no_victims_and_those_wanted_soon_the_last() -> None:
    made = slots(2)
    put(made, (0, 0), (0, 1))
    assert made.overwritable(1, [made[0]], ()) == [made[1]]
    assert made.overwritable(1, (), [(0, 0)]) == [made[1]]
    assert made.overwritable(2, [made[0]], ()) is None


def test_no_victims_are_always_to_be_had() -> None:
    made = slots(1)
    made.users[0] += 1
    assert made.overwritable(0, (), ()) == []


def test_fresh_memory_is_written_to_after_the_mark_it_came_with() -> None:
    mark = PastEvent()
    slots = ExpertSlots(torch.empty(3, 4, dtype=torch.uint8), ExpertPolicy(1, 3), mark)
    assert [slots[number].marks for number in range(3)] == [[mark]] * 3
