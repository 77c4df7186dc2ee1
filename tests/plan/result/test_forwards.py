"""How many forwards of a model its budgets have room for at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigmodel.plan import Plan
from bigmodel.plan.result.forwards import forwards_at_once, further_bytes
from bigmodel.plan.result.plan import Part

from .test_plan import PLAN


def with_budget(budget: int | None, plan: Plan = PLAN) -> Plan:
    return replace(plan, devices={**plan.devices, 0: replace(plan.devices[0], budget=budget)})


def test_a_further_forward_has_keys_values_and_activations_of_its_own() -> None:
    assert further_bytes(PLAN, PLAN.devices[0]) == 20 + 30


@pytest.mark.parametrize(("budget", "count"), [(69, 1), (118, 1), (119, 2), (168, 2), (169, 3), (60, 1)])
def test_what_is_free_is_divided_by_it(budget: int, count: int) -> None:
    assert forwards_at_once(with_budget(budget)) == count


def test_the_device_with_the_least_room_decides() -> None:
    other = replace(PLAN.devices[0], device=1, budget=119)
    plan = with_budget(1000)
    assert forwards_at_once(replace(plan, devices={**plan.devices, 1: other})) == 2


def test_without_a_budget_there_is_no_limit() -> None:
    assert forwards_at_once(with_budget(None)) is None


def test_tensors_of_split_modules_are_copied_by_each_forward_which_may_then_hold_a_slot_of_its_own() -> None:
    scale = Part("scale", "cpu", 0, 3, "streamed from RAM", "Parameter")
    plan = replace(PLAN, parts=(*PLAN.parts, scale))
    assert further_bytes(plan, plan.devices[0]) == 20 + 30 + 3 + plan.slot_bytes
