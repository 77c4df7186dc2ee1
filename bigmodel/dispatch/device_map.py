"""What people may give as a device map, spelt out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

import torch
from torch import nn

from ..devices import DeviceLike
from ..plan import STRATEGIES, make_plan
from ..profile import find_no_split_classes

DeviceMap: TypeAlias = "str | int | torch.device | Mapping[str, DeviceLike]"
"""A strategy's name (``"auto"``, ...), one device for everything, or a device by module name."""


def resolve_device_map(
    model: nn.Module,
    device_map: DeviceMap,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, DeviceLike]:
    """Return `device_map` as a device by module name, planning it where only a strategy is named."""
    if isinstance(device_map, Mapping):
        return dict(device_map)
    if isinstance(device_map, str) and device_map in STRATEGIES:
        plan = make_plan(
            model,
            max_memory=max_memory,
            strategy=device_map,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
        )
        return dict(plan.device_map)
    return {"": device_map}


def whole_classes(
    model: nn.Module, no_split: Collection[str] | None, preload: Collection[str] | None
) -> Collection[str] | None:
    """Return the classes whose modules stay in one piece: those named as not to be split, else those found by
    themselves, and those whose weights are to be loaded as a whole. None when nothing was named."""
    if no_split is None and not preload:
        return None
    found = find_no_split_classes(model) if no_split is None else no_split
    return {*found, *(preload or ())}
