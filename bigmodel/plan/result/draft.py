"""The part that proposes tokens, in the plan of the model that verifies them: its bytes are those of the same devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...devices import DISK, format_size
from ...errors import BudgetError
from .budgets import Key
from .plan import DevicePlan, Plan


def without_draft(budgets: Mapping[Key, int], draft: Plan) -> dict[Key, int]:
    """Return what the part of plan `draft` leaves of the budgets.

    Raises:
        BudgetError: it takes more than a budget.
    """
    left = dict(budgets)
    for key, device in draft.devices.items():
        if key in left and key != DISK:
            left[key] -= device.total
            if left[key] < 0:
                raise BudgetError(
                    f"the part that proposes tokens takes {format_size(device.total)} of {key}, and the budget is "
                    f"{format_size(budgets[key])}; give more, or propose none"
                )
    return left


def with_draft(made: Plan, draft: Plan) -> Plan:
    """Return a plan with the bytes and the passes of what proposes tokens.

    Args:
        made: the model's plan, within what `without_draft` leaves.
        draft: the plan of what proposes them.
    """
    devices: dict[Key, DevicePlan] = {}
    for key, device in made.devices.items():
        taken = draft.devices.get(key)
        if taken is None or key == DISK:
            devices[key] = device
            continue
        budget = None if device.budget is None else device.budget + taken.total
        kv_cache = device.kv_cache + taken.kv_cache
        devices[key] = replace(device, budget=budget, kv_cache=kv_cache, draft=taken.total - taken.kv_cache)
    speculation = made.speculation
    if speculation is not None and draft.speculation is not None:
        speculation = replace(speculation, proposing=draft.speculation.pass_seconds(1))
    return replace(made, devices=devices, speculation=speculation)
