"""Memory budgets: how many bytes of each device may be used."""

from __future__ import annotations

import logging
from collections.abc import ItemsView, Mapping
from typing import TypeAlias

from ..errors import DeviceError, SizeError
from .memory import free_memory_bytes
from .names import DISK, HOST, DeviceLike, accelerators, device_key, is_accelerator
from .sizes import parse_size

logger = logging.getLogger(__name__)

Budget: TypeAlias = "int | str"


def get_max_memory(max_memory: Mapping[DeviceLike, Budget] | None = None) -> dict[int | str, int]:
    """Return the bytes that may be used of each device.

    Args:
        max_memory: Budgets by device: an int, ``"cuda:0"``, ``torch.device``, ``"mps"``, ``"cpu"`` or ``"disk"``, with
            sizes as `parse_size` accepts them. None: the free bytes of each accelerator (cached ones included) and the
            available RAM of this machine.

    Returns:
        Budgets by device key, in the order accelerators ascending, ``"mps"``, ``"cpu"``, ``"disk"``.

    Raises:
        SizeError: `max_memory` is not a mapping, a budget is not a size, or a device is named twice.
        DeviceError: A key is not a device.
    """
    if max_memory is None:
        found: dict[int | str, int] = {device_key(name): free_memory_bytes(name) for name in accelerators()}
        found[HOST] = free_memory_bytes(HOST)
        return found
    budgets: dict[int | str, int] = {}
    for device, size in budget_items(max_memory):
        key = device_key(device)
        if key in budgets:
            raise SizeError(f"max_memory names device {key!r} twice; give one budget")
        try:
            budgets[key] = parse_size(size)
        except SizeError as error:
            raise SizeError(f"max_memory[{device!r}]: {error}") from None
    _warn_of_absent(budgets)
    return dict(sorted(budgets.items(), key=lambda item: _rank(item[0])))


def budget_items(max_memory: Mapping[DeviceLike, Budget]) -> ItemsView[DeviceLike, Budget]:
    """Return the pairs of device and size of `max_memory`, unparsed.

    Raises:
        SizeError: `max_memory` is not a mapping.
    """
    if not isinstance(max_memory, Mapping):
        raise SizeError(f"max_memory is a {type(max_memory).__name__}; give budgets by device, as in {{'cpu': '8GiB'}}")
    return max_memory.items()


def _warn_of_absent(budgets: Mapping[int | str, int]) -> None:
    present = {device_key(name) for name in accelerators()}
    for key in budgets:
        if is_accelerator(key) and key not in present:
            logger.warning("max_memory names device %r, which this machine does not have", key)


def _rank(key: int | str) -> tuple[int, int, str]:
    if isinstance(key, int):
        return 0, key, ""
    order = {"mps": 2, HOST: 3, DISK: 4}
    if key not in order and not is_accelerator(key):
        raise DeviceError(f"{key!r} is not a device that has a budget")
    return order.get(key, 1), 0, key
