from __future__ import annotations

import pytest

from bigmodel.plan.search.capacity import Placement
from bigmodel.plan.search.groups import tie_groups
from bigmodel.plan.search.items import assignment_of, item_of
from bigmodel.profile import profile_model

from ...profile.models import Stack, on_meta, tiny_llama

pytestmark = pytest.mark.usefixtures("accelerators")


def test_an_item_separates_what_moves_from_what_stays() -> None:
    profile = profile_model(tiny_llama(), context_length=32)
    groups = tie_groups(profile.units)
    items = {profile.units[g.members[0]].name: item_of(g, profile, False) for g in groups}
    assert items["model.layers.0"].working == profile.kv_cache[2]
    assert items["model.layers.0"].slab >= items["model.layers.0"].weights
    assert items["model.rotary_emb"].weights == 0
    assert items["model.rotary_emb"].working == profile.buffers
    assert items["model.embed_tokens"].slab == 0


def test_tensors_of_split_modules_are_pinned() -> None:
    profile = profile_model(on_meta(Stack, direct=True))
    pinned = {profile.units[g.members[0]].name for g in tie_groups(profile.units) if item_of(g, profile, False).pinned}
    assert pinned == {"scale", "offset"}


def test_a_streamed_tie_is_looked_up_on_the_host_and_multiplied_on_the_accelerator() -> None:
    profile = profile_model(on_meta(Stack, depth=1, tied=True))
    groups = tie_groups(profile.units)
    placement = Placement(("cpu",) * len(groups), (0,) * len(groups), 0, 2, 64)
    assignment = assignment_of(profile, groups, placement, False)
    runs = {unit.name: assignment.runs[index] for index, unit in enumerate(profile.units)}
    assert (runs["embed"], runs["head"]) == ("cpu", 0)


def test_inputs_are_where_something_runs_unless_another_device_is_asked_for() -> None:
    profile = profile_model(on_meta(Stack, depth=1))
    groups = tie_groups(profile.units)
    placement = Placement((1,) * len(groups), (1,) * len(groups), main=0)
    assert assignment_of(profile, groups, placement, False).main == 1
    assert assignment_of(profile, groups, placement, False, main_device=0).main == 0
