"""How many forwards of a model keep to its budgets at once: a plan counts the memory of one.

A further forward has activations, workspace, and keys and values of its own, as large as those planned. Weights, slots
and caches of experts it shares with the others. Tensors that a split module holds itself have no slot: each forward
copies them, and may then hold a slot of its own beside the shared ones.
"""

from __future__ import annotations

from .budgets import is_accelerator
from .plan import DevicePlan, Plan

SPLIT = ("Parameter", "Buffer")
"""Kinds of the parts that are tensors which a split module holds itself."""


def forwards_at_once(plan: Plan) -> int | None:
    """Return how many planned forwards every device has room for at once, at least one; None: no budget limits them."""
    counts = [
        1 + max(0, device.free) // further
        for device in plan.devices.values()
        if device.free is not None and (further := further_bytes(plan, device))
    ]
    return min(counts, default=None)


def further_bytes(plan: Plan, device: DevicePlan) -> int:
    """Return the bytes that a planned forward takes on a device beside one that runs already.

    Args:
        plan: The plan.
        device: One of its devices.
    """
    own = device.activations + device.workspace + device.kv_cache + device.unused
    if not is_accelerator(device.device):
        return own
    copied = [part.bytes for part in plan.streamed if part.runs_on == device.device and part.kind in SPLIT]
    return own + sum(copied) + (plan.slot_bytes if copied else 0)
