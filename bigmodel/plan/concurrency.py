"""How many sequences a plan has room for: the one figure that admission and memory planning share."""

from __future__ import annotations

from .plan_type import Plan


def max_sequences(plan: Plan) -> int | None:
    """Return how many sequences of the plan's context length fit at once, keys and values of all of them resident.

    Activations are those of the batch that was planned for: more sequences than that are held, not run at once.

    Returns:
        At least the planned batch; None if no device with a budget holds keys or values.
    """
    found = []
    for device in plan.devices.values():
        if device.kv_cache and device.free is not None:
            each = device.kv_cache / plan.batch_size
            found.append(plan.batch_size + int(max(device.free, 0) / each))
    return min(found, default=None)
