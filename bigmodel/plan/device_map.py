"""Device maps as accelerate writes them: checking and tidying."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import DeviceMapError
from ..profile import named_tensors
from ..profile.arguments import check_names

logger = logging.getLogger(__name__)


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that every parameter and buffer of `model` has a place in `device_map`.

    Keys may be modules, parameters or buffers. A key that names nothing in the model is warned about.

    Raises:
        DeviceMapError: tensors without a place; the message names them.
        PlanError: the map is no mapping by name, or the model no module.
    """
    check_names("device_map", device_map)
    tensors = {name: persistent for name, _tensor, _is_buffer, persistent in named_tensors(model)}
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    unknown = [key for key in device_map if key not in modules and key not in tensors]
    if unknown:
        logger.warning("the device map names what is not in the model: %s", ", ".join(sorted(unknown)))
    missing = [name for name, persistent in tensors.items() if persistent and owner_of(name, device_map) is None]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise DeviceMapError(f"the device map gives no device to {shown}; add these or a module that holds them")


def owner_of(name: str, device_map: Mapping[str, Any]) -> str | None:
    """Return the longest key of `device_map` that is `name` or holds it; None if there is none."""
    key = name
    while key:
        if key in device_map:
            return key
        key = key.rpartition(".")[0]
    return "" if "" in device_map else None


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Replace entries that share a device by their common parent, in place, and return the map.

    The order of the entries is kept: a parent stands where its first child stood. A lone entry stays as it is.

    Args:
        device_map: entries by module or tensor name.
        module_name: tidy only below this module.

    Raises:
        PlanError: the map is no mapping by name.
    """
    check_names("device_map", device_map)
    count: dict[str, int] = {}
    common: dict[str, Any] = {}
    for key, device in device_map.items():
        for parent in _itself_and_parents(key, module_name):
            count[parent] = count.get(parent, 0) + 1
            if common.setdefault(parent, device) != device:
                common[parent] = _MIXED
    tidy: dict[str, Any] = {}
    for key, device in device_map.items():
        name = key
        for parent in _itself_and_parents(key, module_name):
            if count[parent] > 1 and common[parent] is not _MIXED:
                name = parent
        tidy[name] = device
    device_map.clear()
    device_map.update(tidy)
    return device_map


_MIXED = object()


def _itself_and_parents(key: str, stop: str) -> Iterator[str]:
    """Yield `key` and the modules that hold it, up to `stop`; nothing if `key` is not inside `stop`."""
    if stop and key != stop and not key.startswith(f"{stop}."):
        return
    while key != stop:
        yield key
        key = key.rpartition(".")[0]
    yield stop
