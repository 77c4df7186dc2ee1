from __future__ import annotations

import pytest

from bigmodel.plan.memory.assemble import assemble
from bigmodel.plan.memory.assignment import Assignment, host_only
from bigmodel.profile import profile_model

from ...profile.models import Stack, on_meta

pytestmark = pytest.mark.usefixtures("accelerators")


def test_reasons_tell_places_apart() -> None:
    profile = profile_model(on_meta(Stack, depth=3, direct=True))
    storage = {"embed": "cpu", "blocks.0": 0, "blocks.1": "cpu", "blocks.2": "disk", "scale": 0}
    where = tuple(storage.get(unit.name, 0) for unit in profile.units)
    execution = tuple("cpu" if unit.name == "embed" else 0 for unit in profile.units)
    plan = assemble(profile, Assignment(where, execution, 0), {0: 10**6, "cpu": 10**6}, "auto")
    reasons = {part.name: part.reason for part in plan.parts}
    assert "looked up in RAM" in reasons["embed"]
    assert "resident" in reasons["blocks.0"]
    assert "streamed from RAM" in reasons["blocks.1"]
    assert "streamed from disk" in reasons["blocks.2"]
    assert "split module" in reasons["scale"]


def test_devices_are_listed_in_the_order_of_the_budgets_and_unlimited_ones_last() -> None:
    profile = profile_model(Stack())
    plan = assemble(profile, host_only(profile), {0: 5, "cpu": 10**6}, "auto")
    assert list(plan.devices) == [0, "cpu"]
    assert plan.devices[0].total == 0


def test_given_reasons_win() -> None:
    profile = profile_model(Stack())
    plan = assemble(profile, host_only(profile), {"cpu": 10**6}, "auto", reasons={0: "because"})
    assert plan.parts[0].reason == "because"
