"""The plan of a given device map: how offloaded modules reach their execution devices, and the bytes of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ...devices import HOST, device_key
from ...plan import Plan, check_device_map
from ...plan.memory.assemble import assemble
from ...plan.memory.assignment import Assignment
from ...profile import Profile, UnitProfile, profile_units
from ...profile.model.dtypes import dtype_name
from ...profile.model.units import UnitModule, is_lookup
from ...profile.trace.workload import Workload
from .dispatch_units import DispatchUnit, find_dispatch_units
from .options import PlanArguments
from .tensors import DeviceMapLookup, PlacedTensor

STRATEGY = "device map"

NOTE = "the device map was given: weights and slots are counted, activations and KV cache are not"


def plan_of_map(model: nn.Module, placement: DeviceMapLookup, asked: PlanArguments) -> Plan:
    """Return the plan of a device map that was given, one part for each unit that it cuts the model into.

    Args:
        model: Any module, also on meta.
        placement: The map.
        asked: What was asked for beside it.

    Raises:
        DeviceMapError: The map does not cover the model.
    """
    check_device_map(model, placement.devices)
    modules = dict(model.named_modules(remove_duplicate=False))
    placed = {each.name: each for each in placement.tensors(model)}
    found = find_dispatch_units(model, modules, placed, asked.no_split_module_classes)
    cut = [each for each in found if each.tensors]
    modules_of_units = [_as_unit(each, modules[each.name]) for each in cut]
    profile = Profile(
        name=type(model).__name__,
        units=tuple(profile_units(model, asked.dtype, units=modules_of_units)),
        workload=Workload(),
        phases=(),
        dtype=None if asked.dtype is None else dtype_name(asked.dtype),
        offload_dtype=asked.offload_dtype,
    )
    budgets = asked.max_memory or {}
    plan = assemble(
        profile,
        _assignment(profile.units, cut, placed, placement, asked),
        budgets,
        STRATEGY,
        reasons=dict.fromkeys(range(len(cut)), "as the device map has it"),
        pinned_memory=asked.pinned_memory,
        resident_limit=budgets.get(HOST),
    )
    room = max(plan.expert_cache.values(), default=None)
    everywhere = {} if room is None else dict.fromkeys(plan.devices, room)  # some may be fetched to where routers lie
    return replace(plan, expert_cache=everywhere, notes=(NOTE,))


def _as_unit(each: DispatchUnit, module: nn.Module) -> UnitModule:
    looked_up = is_lookup(module) and not each.encloses
    return UnitModule(each.name, False, each.encloses, type(module).__name__, looked_up)


def _assignment(
    units: Sequence[UnitProfile],
    cut: Sequence[DispatchUnit],
    placed: Mapping[str, PlacedTensor],
    placement: DeviceMapLookup,
    asked: PlanArguments,
) -> Assignment:
    firsts = [placed[each.tensors[0]] for each in cut]
    looked_up = [unit.is_lookup and each.offloaded for unit, each in zip(units, firsts, strict=True)]
    computes = [device_key(each.execution_device) for each in firsts]
    found = Assignment(
        storage=tuple(device_key(each.storage_device) for each in firsts),
        execution=tuple(HOST if rows else device for device, rows in zip(computes, looked_up, strict=True)),
        main=device_key(placement.main_device),
        stream_buffers=bool(asked.offload_buffers),
        expert_cache=asked.expert_cache,
        computed_below={index: each.computed_below for index, each in enumerate(firsts) if each.computed_below},
    )
    slot_sizes = [
        unit.slot_bytes(found.stream_buffers or index in found.computed_below)
        for index, unit in enumerate(units)
        if found.streamed(index) and not unit.is_tensor
    ]
    return replace(found, slots=min(asked.slots, len(slot_sizes)), slot_bytes=max(slot_sizes, default=0))
