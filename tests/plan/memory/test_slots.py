"""."""

from __future__ import annotations

import pytest

from bigmodel.limits import READ_AHEAD_BYTES, STAGING_BYTES
from bigmodel.plan import read_ahead_window, staging
from bigmodel.plan.memory.assignment import Assignment
from bigmodel.plan.memory.slots import ExpertCapacity, expert_capacities, slots_on
from bigmodel.profile import Profile, profile_model
from bigmodel.profile.model.experts import RouterChoice

from ...dispatch.mixtures import deepseek_v3, mixtral

pytestmark = pytest.mark.usefixtures("accelerators")


def streamed(profile: Profile, storage: str = "cpu") -> Assignment:
    """Return the assignment in which every block is streamed to the first accelerator."""
    blocks = [unit.is_block for unit in profile.units]
    slot_bytes = max(unit.slot_bytes() for unit in profile.units if unit.is_block)
    places = tuple(storage if block else 0 for block in blocks)
    return Assignment(places, (0,) * len(blocks), 0, slots=2, slot_bytes=slot_bytes)


def test_experts_get_what_two_whole_layers_would_take_beside_the_slots_of_the_rest() -> None:
    profile = profile_model(mixtral(), context_length=16)
    assignment = streamed(profile)
    rooms = expert_capacities(profile, assignment)
    block = next(unit for unit in profile.units if unit.is_block)
    assert set(rooms.values()) == {ExpertCapacity(16, 24, block.experts[0].nbytes)}
    assert slots_on(profile, assignment, 0) == 2 * block.slot_bytes()


def test_where_a_dense_layer_needs_larger_slots_experts_get_less() -> None:
    profile = profile_model(deepseek_v3(), context_length=16)
    assignment = streamed(profile)
    rest = max(unit.slot_bytes_without_experts() for unit in profile.units if unit.is_block)
    (room,) = set(expert_capacities(profile, assignment).values())
    whole = max(unit.slot_bytes() for unit in profile.units if unit.is_block)
    assert room.slots == min((2 * whole - 2 * rest) // room.expert_bytes, room.experts)
    assert slots_on(profile, assignment, 0) == 2 * rest + room.slots * room.expert_bytes


def test_experts_on_disk_that_the_host_computes_come_one_by_one_into_its_memory() -> None:
    profile = profile_model(mixtral(), context_length=16)
    blocks = [unit.is_block for unit in profile.units]
    assignment = Assignment(tuple("disk" if block else "cpu" for block in blocks), ("cpu",) * len(blocks), "cpu")
    (room,) = set(expert_capacities(profile, assignment).values())
    assert room.slots == 16
    assert slots_on(profile, assignment, "cpu") >= 16 * room.expert_bytes


def test_a_room_for_all_experts_brings_none_again() -> None:
    assert ExpertCapacity(24, 24, 100).brought(RouterChoice(1, 2, 8)) == (0, 0)


def test_a_step_waits_for_the_share_of_its_experts_that_is_not_there() -> None:
    assert ExpertCapacity(6, 24, 100).brought(RouterChoice(1, 2, 8)) == (0, pytest.approx(2 * 18 / 24))


def test_a_prompt_that_wants_all_brings_the_next_layers_ahead_as_far_as_there_is_room() -> None:
    assert ExpertCapacity(16, 24, 100).brought(RouterChoice(1000, 2, 8)) == (pytest.approx(8), 0)
    assert ExpertCapacity(11, 24, 100).brought(RouterChoice(1000, 2, 8)) == (pytest.approx(3), pytest.approx(5))
    assert ExpertCapacity(4, 24, 100).brought(RouterChoice(1000, 2, 8)) == (0, pytest.approx(8))


def test_it_holds_the_largest_block_and_the_beginning_of_the_next() -> None:
    assert read_ahead_window([3 * READ_AHEAD_BYTES, 4 * READ_AHEAD_BYTES, 3 * READ_AHEAD_BYTES]) == 5 * READ_AHEAD_BYTES


def test_of_small_blocks_it_holds_two() -> None:
    assert read_ahead_window([10, 30, 20]) == 60
    assert read_ahead_window([10, 30, 20, 30]) == 60


def test_it_is_never_larger_than_what_passes_through_it() -> None:
    assert read_ahead_window([30, 20]) == 50
    assert read_ahead_window([]) == 0


def test_what_is_staged_is_two_blocks_at_most() -> None:
    assert staging([]) == 0
    assert staging([10, 30]) == 40
    assert staging([10, 30, 30]) == 60
    assert staging([STAGING_BYTES, STAGING_BYTES]) == STAGING_BYTES
