"""The plan of a given device map: execution devices, slots, expert caches and the bytes of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ...devices import HOST, device_key
from ...plan import Plan, check_device_map
from ...plan.memory.assignment import Assignment, assemble
from ...plan.planner import reader_count
from ...plan.result.budgets import caching_memories
from ...plan.result.stages import stage_runs
from ...plan.search.items import most_staging_bytes
from ...profile import Profile, UnitProfile, profile_units
from ...profile.model.tensors import dtype_name
from ...profile.model.units import UnitModule, is_lookup
from ...profile.trace.workload import Workload
from ...quantized.host_kernels import PACKED
from ...quantized.packable import packing_note
from .dispatch_units import DispatchUnit, find_dispatch_units
from .options import PlanArguments
from .tensors import DeviceMapLookup, PlacedTensor

STRATEGY = "device map"

NOTE = "the device map was given: weights and slots are counted, activations and KV cache are not"


def plan_of_map(model: nn.Module, placement: DeviceMapLookup, asked: PlanArguments) -> Plan:
    """Return the plan of a given device map, with one part per dispatch unit.

    Args:
        model: Any module, also on meta.
        placement: The map.
        asked: Arguments given together with the map.

    Raises:
        DeviceMapError: The map does not cover the model.
    """
    check_device_map(model, placement.devices)
    modules = dict(model.named_modules(remove_duplicate=False))
    placed = {each.name: each for each in placement.tensors(model)}
    found = find_dispatch_units(model, modules, placed, asked.no_split_module_classes)
    units = [each for each in found if each.tensors]
    modules_of_units = [_as_unit(each, modules[each.name]) for each in units]
    packed = asked.host_kernels == PACKED
    profile = Profile(
        name=type(model).__name__,
        units=tuple(profile_units(model, asked.dtype, units=modules_of_units, packed=packed)),
        workload=Workload(),
        phases=(),
        dtype=None if asked.dtype is None else dtype_name(asked.dtype),
        offload_dtype=asked.offload_dtype,
        packing=packing_note(model) if packed else "",
    )
    budgets = asked.max_memory or {}
    plan = assemble(
        profile,
        _assignment(profile.units, units, placed, placement, asked),
        budgets,
        STRATEGY,
        reasons=dict.fromkeys(range(len(units)), "as the device map has it"),
        pinned_memory=asked.pinned_memory,
        resident_limit=budgets.get(HOST),
    )
    cache_bytes = max(plan.expert_cache.values(), default=None)
    # On every device: experts are fetched to the device of their router.
    expert_cache = {} if cache_bytes is None else dict.fromkeys(plan.devices, cache_bytes)
    notes = (NOTE, *((profile.packing,) if packed else ()))
    made = replace(plan, expert_cache=expert_cache, micro_batch_size=asked.micro_batch_size, notes=notes)
    return made if stage_runs(made) else replace(made, micro_batch_size=None)


def _as_unit(each: DispatchUnit, module: nn.Module) -> UnitModule:
    looked_up = is_lookup(module) and not each.encloses
    return UnitModule(each.name, False, each.encloses, type(module).__name__, looked_up)


def _assignment(
    profiles: Sequence[UnitProfile],
    units: Sequence[DispatchUnit],
    placed: Mapping[str, PlacedTensor],
    placement: DeviceMapLookup,
    asked: PlanArguments,
) -> Assignment:
    firsts = [placed[each.tensors[0]] for each in units]
    looked_up = [profile.is_lookup and each.offloaded for profile, each in zip(profiles, firsts, strict=True)]
    computes = [device_key(each.execution_device) for each in firsts]
    readers = reader_count()
    found = Assignment(
        storage=tuple(device_key(each.storage_device) for each in firsts),
        execution=tuple(HOST if rows else device for device, rows in zip(computes, looked_up, strict=True)),
        main=device_key(placement.main_device),
        stream_buffers=bool(asked.offload_buffers),
        expert_cache=asked.expert_cache,
        computed_below={index: each.computed_below for index, each in enumerate(firsts) if each.computed_below},
        readers=readers,
        staging_bytes=most_staging_bytes(readers),
        caching=caching_memories(dict.fromkeys(computes)),
    )
    slot_sizes = [
        profile.slot_bytes(found.stream_buffers or index in found.computed_below)
        for index, profile in enumerate(profiles)
        if found.streamed(index) and not profile.is_tensor
    ]
    return replace(found, slots=min(asked.slots, len(slot_sizes)), slot_bytes=max(slot_sizes, default=0))
