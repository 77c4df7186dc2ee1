"""Device maps by weights alone, made by this planner for the functions of `accelerate_api`."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from ..arguments import check_flags, check_model
from ..devices import DeviceLike, format_size
from ..limits import PLANNED_SHARE
from ..profile import DtypeLike, UnitProfile, profile_units
from .device_maps import clean_device_map
from .memory.usage import PassingUnit
from .result.budgets import Key, budget_error, is_accelerator, read_budgets, whole_bytes
from .search.filling import balanced_caps, place_greedily
from .search.items import Capacity, Group, GroupPlacement, Item, tie_groups

logger = logging.getLogger(__name__)

_CALLER = 4
"""How many calls a warning is away from the caller of `accelerate_api.infer_auto_device_map`."""


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None,
    no_split_module_classes: Iterable[str] | str | None,
    dtype: DtypeLike | None,
    special_dtypes: Mapping[str, DtypeLike] | None,
    verbose: bool,
    clean_result: bool,
    offload_buffers: bool,
    fallback_allocation: bool,
) -> OrderedDict[str, int | str]:
    """Return the device map that `accelerate_api.infer_auto_device_map` documents."""
    check_flags(verbose=verbose, clean_result=clean_result, offload_buffers=offload_buffers)
    check_flags(fallback_allocation=fallback_allocation)
    capacity = Capacity(read_budgets(whole_bytes(max_memory)), slots=1, host_compute=True)
    units, groups, placement = _placed(model, dtype, special_dtypes, no_split_module_classes, capacity)
    if fallback_allocation and no_split_module_classes is None and not any(map(is_accelerator, placement.storage)):
        units, groups, placement = _placed(model, dtype, special_dtypes, (), capacity)
    if not offload_buffers:
        _warn_about_buffers(groups, placement, capacity)
    device_map = OrderedDict(_in_order(units, groups, placement))
    if verbose:
        for name, device in device_map.items():
            logger.warning("%s -> %s", name or "the model", device)
    return OrderedDict(clean_device_map(dict(device_map))) if clean_result else device_map


def _placed(
    model: nn.Module,
    dtype: DtypeLike | None,
    special_dtypes: Mapping[str, DtypeLike] | None,
    no_split_module_classes: Iterable[str] | str | None,
    capacity: Capacity,
) -> tuple[Sequence[UnitProfile], Sequence[Group], GroupPlacement]:
    """Return the units of the model, those with ties together, and where these lie.

    Raises:
        BudgetError: nothing fits.
    """
    units = profile_units(model, dtype, special_dtypes, no_split_module_classes, as_loaded=False)
    groups = tie_groups(units)
    items = [_item(group, units) for group in groups]
    placement = place_greedily(items, capacity)
    if placement is None:
        total = sum(item.weights + item.slot_bytes for item in items)
        raise budget_error(capacity.budgets, total, partial(_fits, items, capacity))
    return units, groups, placement


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
        warnings.warn(
            f"buffers of layers that are not resident take {format_size(buffers)}, but device {placement.main} has "
            f"{format_size(free)} left; pass offload_buffers=True or raise its budget",
            UserWarning,
            _CALLER,
        )


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None,
    no_split_module_classes: Iterable[str] | str | None,
    dtype: DtypeLike | None,
    special_dtypes: Mapping[str, DtypeLike] | None,
    low_zero: bool,
) -> dict[int | str, int]:
    """Return the budgets that `accelerate_api.get_balanced_memory` documents."""
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
