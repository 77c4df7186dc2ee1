from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigmodel.plan.search.groups import tie_groups
from bigmodel.profile import compute_module_sizes, profile_units

from ...profile.models import Stack, on_meta


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
