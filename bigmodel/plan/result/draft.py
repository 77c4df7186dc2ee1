"""The part that proposes tokens, in the plan of the model that verifies them: they share devices and budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...devices import DISK, format_size
from ...errors import BudgetError
from .budgets import Key
from .plan import DevicePlan, Plan


def without_draft(budgets: Mapping[Key, int], draft: Plan, *, apart: bool = False) -> dict[Key, int]:
    """Return what the part of plan `draft` leaves of the budgets.

    Args:
        budgets: bytes by device key.
        draft: the plan of what proposes tokens.
        apart: its temporary tensors have bytes of their own. Otherwise they take those of the model's, which are there
            at other times.

    Raises:
        BudgetError: it takes more than a budget.
    """
    left = dict(budgets)
    for key, device in draft.devices.items():
        if key in left and key != DISK:
            left[key] -= device.total if apart else device.total - _temporary(device)
            if left[key] < 0:
                raise BudgetError(
                    f"the part that proposes tokens takes {format_size(device.total)} of {key}, and the budget is "
                    f"{format_size(budgets[key])}; give more, or propose none"
                )
    return left


def with_draft(made: Plan, draft: Plan, budgets: Mapping[Key, int]) -> Plan | None:
    """Return a plan with the bytes and the passes of what proposes tokens; None if these are more than the budgets.

    Args:
        made: the model's plan, within what `without_draft` leaves.
        draft: the plan of what proposes them.
        budgets: those of both.
    """
    devices: dict[Key, DevicePlan] = {}
    for key, device in made.devices.items():
        taken = draft.devices.get(key)
        if taken is None or key == DISK:
            devices[key] = device
            continue
        beyond = max(_temporary(taken) - _temporary(device), 0)
        both = replace(
            device,
            budget=None if device.budget is None else budgets.get(key),
            kv_cache=device.kv_cache + taken.kv_cache,
            draft=taken.total - _temporary(taken) - taken.kv_cache + beyond,
        )
        if (both.free or 0) < 0:
            return None
        devices[key] = both
    speculation = made.speculation
    if speculation is not None and draft.speculation is not None:
        speculation = replace(speculation, proposing=draft.speculation.pass_seconds(1))
    return replace(made, devices=devices, speculation=speculation)


def _temporary(device: DevicePlan) -> int:
    """Return the bytes of a plan's temporary tensors on a device."""
    return device.activations + device.workspace
