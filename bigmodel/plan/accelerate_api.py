"""Accelerate's functions about device maps, with accelerate's signatures, on this planner."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

from torch import nn

from ..arguments import check_flags, check_model, check_names
from ..devices import DeviceLike, format_size
from ..errors import DeviceMapError
from ..limits import PLANNED_SHARE
from ..profile import DtypeLike, UnitProfile, named_tensors, profile_units
from ..profile.model.tensors import owner_of, with_ancestors
from .memory.usage import PassingUnit
from .result.budgets import Key, budget_error, is_accelerator, read_budgets
from .search.filling import balanced_caps, place_greedily
from .search.items import Capacity, Group, GroupPlacement, Item, tie_groups

logger = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, int | str]:
    """Return a device map that fills accelerators in order, then RAM, then disk. Counts weights only.

    It differs from accelerate's: bytes of the largest streamed layer are reserved only if a layer is streamed; layers
    after one that does not fit an accelerator are placed on it if they fit; buffers and parameters that a split module
    holds itself are placed, too; classes that must not be split are found if none are given. `make_plan` also counts KV
    cache and activations, and predicts time.

    Args:
        model: any module, also on meta.
        max_memory: budgets as `get_max_memory` takes them; None: what is free. `"disk"` is unlimited unless given.
        no_split_module_classes: class names not to be split; None: find them; `[]`: split down to leaf modules.
        dtype: floating point tensors count in this dtype, but not with more bytes than now.
        special_dtypes: dtype by tensor name; takes precedence over `dtype`.
        verbose: log every decision.
        clean_result: replace siblings on one device by their parent.
        offload_buffers: False: buffers of units that are not resident count on the main device.
        fallback_allocation: accepted and ignored: later layers are always tried on every device.

    Raises:
        BudgetError: nothing fits, because `"disk"` was given a budget that is too small.
        PlanError: an argument is invalid; the message names it.
        SizeError: a budget is not a size.
        DeviceError: a budget is given for an unknown device.
    """
    check_flags(verbose=verbose, clean_result=clean_result, offload_buffers=offload_buffers)
    units = profile_units(model, dtype, special_dtypes, no_split_module_classes, as_loaded=False)
    groups = tie_groups(units)
    capacity = Capacity(read_budgets(whole_bytes(max_memory)), slots=1, host_compute=True)
    items = [_item(group, units) for group in groups]
    placement = place_greedily(items, capacity)
    if placement is None:
        total = sum(item.weights + item.slot_bytes for item in items)
        raise budget_error(capacity.budgets, total, partial(_fits, items, capacity))
    if not offload_buffers:
        _warn_about_buffers(groups, placement, capacity)
    device_map = OrderedDict(_in_order(units, groups, placement))
    if verbose:
        for name, device in device_map.items():
            logger.warning("%s -> %s", name or "the model", device)
    return OrderedDict(clean_device_map(dict(device_map))) if clean_result else device_map


def _fits(items: Sequence[Item], capacity: Capacity, budgets: Mapping[Key, int]) -> bool:
    return place_greedily(items, replace(capacity, budgets=budgets)) is not None


def _item(group: Group, units: Sequence[UnitProfile]) -> Item:
    return Item(group.nbytes, units=tuple(PassingUnit(slot=units[index].nbytes) for index in group.members))


def _in_order(
    units: Sequence[UnitProfile], groups: Sequence[Group], placement: GroupPlacement
) -> Iterator[tuple[str, int | str]]:
    device_of = {index: placement.storage[at] for at, group in enumerate(groups) for index in group.members}
    for index, unit in enumerate(units):
        yield unit.name, device_of[index]


def _warn_about_buffers(groups: Sequence[Group], placement: GroupPlacement, capacity: Capacity) -> None:
    """Warn if the buffers of units that are not resident do not fit the rest of the main device's budget."""
    if not is_accelerator(placement.main):
        return
    stored = list(zip(groups, placement.storage, strict=True))
    buffers = sum(group.buffers for group, key in stored if not is_accelerator(key))
    resident = sum(group.nbytes for group, key in stored if key == placement.main)
    free = capacity.budgets[placement.main] - resident - placement.slots * placement.slot_bytes
    if buffers > free:
        logger.warning(
            "buffers of layers that are not resident take %s, but device %s has %s left; pass offload_buffers=True "
            "or raise its budget",
            format_size(buffers),
            placement.main,
            format_size(free),
        )


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return budgets under which filling the accelerators in order spreads the model evenly over them.

    They are the smallest caps under which everything fits in order. The budgets are unchanged if the model does not
    fit all accelerators together.

    Args:
        model: any module, also on meta.
        max_memory: budgets as `get_max_memory` takes them; None: what is free.
        no_split_module_classes: class names not to be split; None: find them.
        dtype: floating point tensors count as this dtype.
        special_dtypes: dtype by tensor name; takes precedence over `dtype`.
        low_zero: keep the first accelerator as empty as possible, for other work such as generation.

    Raises:
        PlanError: an argument is invalid; the message names it.
        SizeError: a budget is not a size.
        DeviceError: a budget is given for an unknown device.
    """
    check_model(model)
    check_flags(low_zero=low_zero)
    budgets = read_budgets(whole_bytes(max_memory))
    keys = [key for key, size in budgets.items() if size > 0 and is_accelerator(key)]
    if len(keys) == 1 and max_memory is None:
        budgets[keys[0]] = int(budgets[keys[0]] * PLANNED_SHARE)
    if len(keys) < 2:
        return budgets
    units = profile_units(model, dtype, special_dtypes, no_split_module_classes, as_loaded=False)
    caps = balanced_caps([group.nbytes for group in tie_groups(units)], [budgets[k] for k in keys], low_zero)
    budgets.update(zip(keys, caps, strict=True))
    return budgets


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


def whole_bytes(max_memory: Mapping[DeviceLike, int | str] | None) -> Mapping[DeviceLike, int | str] | None:
    """Return budgets with those rounded down that are fractions of bytes: callers take shares of what is free."""
    if not isinstance(max_memory, Mapping):
        return max_memory
    return {key: int(size) if isinstance(size, float) and isfinite(size) else size for key, size in max_memory.items()}
