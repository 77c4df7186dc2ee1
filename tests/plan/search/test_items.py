"""Groups, items, and placements as assignments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigmodel.plan.search.items import Capacity, GroupPlacement, Item, assignment_of, item_of, tie_groups
from bigmodel.profile import compute_module_sizes, profile_model, profile_units

from ...profile.models import Stack, on_meta, tiny_llama

pytestmark = pytest.mark.usefixtures("accelerators")


def test_an_item_separates_weights_from_working_memory() -> None:
    profile = profile_model(tiny_llama(), context_length=32)
    groups = tie_groups(profile.units)
    items = {profile.units[g.members[0]].name: item_of(g, profile, False) for g in groups}
    assert items["model.layers.0"].working == profile.kv_cache[2]
    assert items["model.layers.0"].slot_bytes >= items["model.layers.0"].weights
    assert items["model.rotary_emb"].weights == 0
    assert items["model.rotary_emb"].working == profile.buffers
    assert items["model.embed_tokens"].slot_bytes == 0


def test_tensors_of_split_modules_are_pinned() -> None:
    profile = profile_model(on_meta(Stack, direct=True))
    pinned = {profile.units[g.members[0]].name for g in tie_groups(profile.units) if item_of(g, profile, False).pinned}
    assert pinned == {"scale", "offset"}


def test_a_streamed_tie_is_looked_up_on_the_host_and_multiplied_on_the_accelerator() -> None:
    profile = profile_model(on_meta(Stack, depth=1, tied=True))
    groups = tie_groups(profile.units)
    placement = GroupPlacement(("cpu",) * len(groups), (0,) * len(groups), 0, 2, 64)
    assignment = assignment_of(profile, groups, placement, False, Capacity({}))
    execution = {unit.name: assignment.execution[index] for index, unit in enumerate(profile.units)}
    assert (execution["embed"], execution["head"]) == ("cpu", 0)


def test_the_main_device_of_an_assignment_runs_something_unless_it_was_given() -> None:
    profile = profile_model(on_meta(Stack, depth=1))
    groups = tie_groups(profile.units)
    placement = GroupPlacement((1,) * len(groups), (1,) * len(groups), main=0)
    assert assignment_of(profile, groups, placement, False, Capacity({})).main == 1
    assert assignment_of(profile, groups, placement, False, Capacity({}, main_device=0)).main == 0


def test_units_without_ties_are_groups_of_one() -> None:
    units = profile_units(Stack(depth=3))
    groups = tie_groups(units)
    assert [group.members for group in groups] == [(index,) for index in range(len(units))]
    assert [group.nbytes for group in groups] == [unit.nbytes for unit in units]


def test_tied_units_are_one_group_that_counts_the_tie_once() -> None:
    model = on_meta(Stack, depth=2, tied=True)
    units = profile_units(model)
    first = tie_groups(units)[0]
    assert [units[index].name for index in first.members] == ["embed", "head"]
    assert first.nbytes == units[0].nbytes
    assert sum(group.nbytes for group in tie_groups(units)) == compute_module_sizes(model)[""]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=6))
def test_every_unit_is_in_one_group_and_bytes_add_up(ties: list[tuple[int, int]]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    for a, b in ties:
        model[a].weight = model[b].weight
    groups = tie_groups(profile_units(model))
    assert sorted(index for group in groups for index in group.members) == list(range(8))
    assert sum(group.nbytes for group in groups) == compute_module_sizes(model)[""]
    group_of = {index: group for group in groups for index in group.members}
    for a in range(8):
        for b in range(8):
            if model[a].weight is model[b].weight:
                assert group_of[a] is group_of[b]


def test_a_quantised_group_has_fewer_bytes_only_if_it_is_streamed() -> None:
    plain, quantised = Item(weights=8, working=2), Item(weights=8, working=2, offloaded=3)
    assert plain.stored_bytes(("cpu", 0)) == plain.stored_bytes(("cpu", "cpu")) == 8
    assert quantised.stored_bytes(("cpu", 0)) == quantised.stored_bytes(("disk", 0)) == 3
    assert quantised.stored_bytes(("cpu", "cpu")) == quantised.stored_bytes((0, 0)) == 8
    assert plain.nbytes == quantised.nbytes == 10


def test_accelerators_are_devices_other_than_host_and_disk_with_a_budget() -> None:
    assert Capacity({0: 0, 1: 5, "mps": 7, "cpu": 9, "disk": 9}).accelerators == [1, "mps"]


def test_the_main_device_is_the_given_one_else_the_first_accelerator_else_the_host() -> None:
    assert Capacity({0: 5, 1: 5, "cpu": 9}, main_device=1).main == 1
    assert Capacity({0: 0, 1: 5, "cpu": 9}).main == 1
    assert Capacity({0: 0, "cpu": 9}).main == "cpu"
