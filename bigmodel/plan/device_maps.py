"""Accelerate's functions that check and shorten device maps. They import no planning: libraries import them as they
start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..arguments import check_names
from ..errors import DeviceMapError
from ..profile.model.tensors import named_tensors, owner_of, with_ancestors

logger = logging.getLogger(__name__)


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that `device_map` gives every parameter and buffer of `model` a device.

    Keys may be modules, parameters or buffers. Keys that are not in the model are logged as a warning.

    Raises:
        DeviceMapError: tensors have no device; the message names them.
        PlanError: the map is not a mapping by name, or the model is not a module.
    """
    check_names("device_map", device_map)
    tensors = {name: persistent for name, _tensor, _is_buffer, persistent in named_tensors(model)}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [key for key in device_map if key not in modules and key not in tensors]
    if unknown:
        logger.warning("the device map has keys that are not in the model: %s", ", ".join(sorted(unknown)))
    missing = [name for name, persistent in tensors.items() if persistent and owner_of(name, device_map) is None]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise DeviceMapError(f"the device map gives no device to {shown}; add these or a module that holds them")


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Replace entries that share a device by their common parent, in place, and return the map.

    The order of the entries is kept: a parent takes the place of its first child. A single entry is unchanged.

    Args:
        device_map: entries by module or tensor name.
        module_name: merge only entries below this module.

    Raises:
        PlanError: the map is not a mapping by name.
    """
    check_names("device_map", device_map)
    count: dict[str, int] = {}
    common: dict[str, Any] = {}
    for key, device in device_map.items():
        for parent in _ancestors_below(key, module_name):
            count[parent] = count.get(parent, 0) + 1
            if common.setdefault(parent, device) != device:
                common[parent] = _MIXED
    merged: dict[str, Any] = {}
    for key, device in device_map.items():
        name = key
        for parent in _ancestors_below(key, module_name):
            if count[parent] > 1 and common[parent] is not _MIXED:
                name = parent
        merged[name] = device
    device_map.clear()
    device_map.update(merged)
    return device_map


_MIXED = object()


def _ancestors_below(key: str, stop: str) -> list[str]:
    """Return `key` and its ancestors up to `stop`; none if `key` is not inside `stop`."""
    found = list(with_ancestors(key))
    return found[: found.index(stop) + 1] if stop in found else []
