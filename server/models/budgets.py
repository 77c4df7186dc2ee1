"""The budgets that the models of a server share."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from bigmodel.devices import DISK, DeviceLike
from bigmodel.plan.result.budgets import caching_memories, device_name, read_budgets, with_headroom, within_devices
from bigmodel.server.models.policy import Key

logger = logging.getLogger(__name__)


def server_budgets(max_memory: Mapping[DeviceLike, int | str] | None = None) -> dict[Key, int]:
    """Return bytes by device key for all models together, as the planner takes them for one.

    Args:
        max_memory: Budgets by device, as `plan` takes them; None: what is free now, but for a share of it.

    Raises:
        SizeError: A budget is not a size.
        DeviceError: A key is not a device.
    """
    budgets = read_budgets(max_memory)
    budgets, lowered = within_devices(budgets, caching_memories(budgets))
    for note in lowered:
        logger.warning("%s", note)
    return with_headroom(budgets) if max_memory is None else budgets


def shown_device(key: Key) -> str:
    """Name of a device for clients, also of one that this machine lacks."""
    return DISK if key == DISK else device_name(key)
