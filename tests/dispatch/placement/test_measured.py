"""Plans made anew from measured activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from bigmodel import dispatch_model, make_plan
from bigmodel.dispatch.placement.measured import corrected_plan, kept_in_memory, plan_measured
from bigmodel.dispatch.placement.options import PlanArguments
from bigmodel.dispatch.placement.resolve import ResolvedMap, map_of_plan
from bigmodel.limits import UNKNOWN_SHARE
from bigmodel.profile.trace.measured import MeasuredForward

from ...accelerators import exact

pytestmark = pytest.mark.usefixtures("every_accelerator")

LAYER = 4 * (16 * 16 + 16)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def guarded(found: nn.Module, budget: int, host: int = 10**6) -> ResolvedMap:
    plan = make_plan(found, {0: budget, "cpu": host})
    assert plan.guarded
    return map_of_plan(found, plan, PlanArguments())


def measured(peak: int) -> MeasuredForward:
    return MeasuredForward(peak, ("0", "1", "2", "3"))


@exact
def test_a_share_stays_free_for_larger_inputs_where_it_can() -> None:
    found = model()
    roomy = plan_measured(found, guarded(found, 10 * LAYER), measured(LAYER))
    assert not roomy.streamed
    assert roomy.devices[0].free == 5 * LAYER
    assert roomy.devices[0].budget == 10 * LAYER
    between = plan_measured(found, guarded(found, 6 * LAYER), measured(LAYER))
    assert between.streamed
    assert between.devices[0].total <= 6 * LAYER * (1 - UNKNOWN_SHARE)


def test_what_the_guard_could_run_is_planned_however_tight() -> None:
    found = model()
    before = guarded(found, 3 * LAYER)
    least = before.plan.devices[0].total
    plan = plan_measured(found, before, measured(3 * LAYER - least))
    assert plan.slots == 1
    assert plan.devices[0].total == 3 * LAYER
    assert not plan.guarded


def test_the_plan_alone_is_corrected_where_the_placement_must_stay() -> None:
    found = model()
    before = guarded(found, 10 * LAYER).plan
    after = corrected_plan(before, measured(500))
    assert after.device_map == before.device_map
    assert after.devices[0].activations == 500
    assert not after.guarded


def test_weights_in_memory_stay_there_and_those_in_a_file_on_disk(tmp_path: Path) -> None:
    found = model()
    resolved = guarded(found, 10 * LAYER, host=2 * LAYER)
    assert set(resolved.plan.device_map.values()) == {"cpu", "disk"}
    assert set(kept_in_memory(found, resolved).plan.device_map.values()) == {"cpu"}
    unguarded = replace(resolved.plan, guarded=False)
    dispatch_model(found, unguarded, offload_dir=tmp_path)
    assert kept_in_memory(found, resolved) is resolved
