"""Resolves every accepted form of a device map to devices by module name and a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ...devices import DISK, HOST, DeviceLike, check_present, device_key
from ...errors import DeviceError, PlanError
from ...plan import STRATEGIES, Plan, check_device_map, plan
from ...plan.result.budgets import is_accelerator
from ...profile import find_no_split_classes, profile_units
from ...profile.model.quantized import refuse_twice
from ...profile.model.units import is_lookup
from ...quantized.stored import published
from .map_plan import plan_of_map
from .options import PlanArguments
from .tensors import DeviceMapLookup

DeviceMap: TypeAlias = "str | int | torch.device | Mapping[str, DeviceLike] | Plan"
"""A strategy's name (``"auto"``, ...), one device for everything, a device by module name, or a plan."""


@dataclass(frozen=True)
class ResolvedMap:
    """A resolved device map.

    Attributes:
        devices: Storage device of each module.
        plan: The plan that the map was taken from, or that was made of it.
        main_device: Execution device of offloaded modules; None: the first accelerator of the map, else the host.
        execution: Offloaded modules that run on the host or another accelerator instead, by name.
        computed_below: Streamed modules whose calls of fewer than so many tokens the host computes, by name.
        arguments: What to plan with again once activations are measured, if the plan is guarded.
        aligned: Weights on disk that are copied to memory, since their file does not align them, by name.
        are_budgets_given: Whether the plan's budgets are the caller's; False: a share of what is free.
    """

    devices: dict[str, DeviceLike]
    plan: Plan
    main_device: DeviceLike | None = None
    execution: Mapping[str, DeviceLike] = field(default_factory=dict)
    computed_below: Mapping[str, int] = field(default_factory=dict)
    arguments: PlanArguments = field(default_factory=PlanArguments)
    aligned: frozenset[str] = frozenset()
    are_budgets_given: bool = True

    @property
    def keys(self) -> dict[str, int | str]:
        """Storage device of each module, as device keys."""
        return {name: device_key(device) for name, device in self.devices.items()}

    @property
    def reads_ahead(self) -> bool:
        """Whether the host computes with weights on disk under a memory limit, so that they are paged in by turns."""
        on_disk = DISK in self.placement.devices.values()
        return on_disk and self.placement.main_device == HOST and self.plan.resident_limit is not None

    @property
    def placement(self) -> DeviceMapLookup:
        """Lookup of storage and execution devices by this map."""
        return DeviceMapLookup(self.devices, self.main_device, self.execution, self.computed_below)


def resolve_device_map(
    model: nn.Module, device_map: DeviceMap, arguments: PlanArguments | None = None, **planned: Any
) -> ResolvedMap:
    """Resolve `device_map`, and return it with its plan: the one given, or one made here.

    Args:
        model: The model to be dispatched.
        device_map: As for `dispatch_model`.
        arguments: Arguments given together with the map.
        planned: `batch_size`, `context_length`, `per_pass`, `sample_inputs`, `padded`, `draft_tokens`,
            `prefill_chunk_size`, as for `plan`; used if `device_map` is a strategy.

    Raises:
        DeviceError: `device_map` is neither a strategy nor a device, or names an accelerator that this machine does not
            have.
        DeviceMapError: It does not cover the model.
        PlanError: An argument contradicts the plan, or cannot be used with this map.
        BudgetError: The model does not fit the budgets.
    """
    asked = arguments or PlanArguments()
    if isinstance(device_map, Plan):
        asked.check(device_map)
        _check_parts(model, device_map, asked.no_split_module_classes)
        return map_of_plan(model, device_map, asked)
    if isinstance(device_map, str) and device_map in STRATEGIES:
        resolved = map_of_plan(model, _make_plan(model, device_map, asked, planned), asked)
        return replace(resolved, are_budgets_given=asked.max_memory is not None)
    devices = dict(device_map) if isinstance(device_map, Mapping) else {"": _checked_device(device_map)}
    if asked.offload == "auto":
        raise PlanError("offload='auto' needs a plan: give device_map='auto', or a plan made with offload='auto'")
    execution = dict.fromkeys(devices, HOST) if asked.offload == "compute" else {}
    return resolve_given(model, devices, asked, execution)


def resolve_given(
    model: nn.Module,
    devices: Mapping[str, DeviceLike],
    arguments: PlanArguments | None = None,
    execution: Mapping[str, DeviceLike] | None = None,
    computed_below: Mapping[str, int] | None = None,
) -> ResolvedMap:
    """Return a given map of devices, with the plan made of it.

    Args:
        model: The model to be dispatched.
        devices: Storage device of each module.
        arguments: Arguments given together with the map.
        execution: As for `ResolvedMap`.
        computed_below: As for `ResolvedMap`.

    Raises:
        DeviceError: This machine does not have one of the devices.
        DeviceMapError: The map does not cover the model.
        PlanError: Weights that are stored quantised would be quantised for the link.
    """
    asked = arguments or PlanArguments()
    stored = published(model)
    if asked.offload_dtype is not None and stored is not None:
        refuse_twice(asked.offload_dtype, stored.label)
    placement = DeviceMapLookup(devices, asked.main_device, execution, computed_below)
    _check_present(placement)
    plan = plan_of_map(model, placement, asked)
    return ResolvedMap(dict(devices), plan, asked.main_device, execution or {}, computed_below or {})


def _make_plan(model: nn.Module, strategy: str, asked: PlanArguments, planned: dict[str, Any]) -> Plan:
    common: dict[str, Any] = {
        "max_memory": asked.max_memory,
        "main_device": asked.main_device,
        "no_split_module_classes": asked.no_split_module_classes,
        "offload_buffers": bool(asked.offload_buffers),
        "offload_dtype": asked.offload_dtype,
        "host_kernels": asked.host_kernels,
        "expert_cache": asked.expert_cache,
        "pinned_memory": asked.pinned_memory,
        "dtype": asked.dtype,
        "micro_batch_size": asked.micro_batch_size,
    }
    offload = asked.offload or "stream"
    if offload != "stream" and strategy != "auto":
        raise PlanError(
            f"offload={offload!r} works with device_map='auto' or a device by module, not with {strategy!r}"
        )
    # Whether the host should compute a part depends on measured speeds.
    objective = None if offload == "stream" else "latency"
    return plan(model, strategy=strategy, objective=objective, offload=offload, **common, **planned)


def _check_parts(model: nn.Module, given: Plan, classes: Collection[str] | None) -> None:
    """Raise PlanError if the plan splits modules of `classes`, or has larger parts."""
    if classes is None:
        return
    parts = {part.name for part in given.parts}
    others = [unit for unit in profile_units(model, no_split_module_classes=classes) if unit.tensors]
    differing = next((unit.name for unit in others if unit.name not in parts), None)
    if differing is not None:
        raise PlanError(
            f"no_split_module_classes is {sorted(classes)}, by which {differing!r} is one part, but it is none of the "
            f"plan's {len(parts)} parts: leave the argument out, or make the plan with it"
        )


def _checked_device(name: DeviceLike) -> DeviceLike:
    """Return `name` if it is a device; otherwise raise DeviceError, which also lists the strategies."""
    try:
        device_key(name)
    except DeviceError as error:
        raise DeviceError(
            f"device_map is {name!r}, which is neither a strategy ({', '.join(STRATEGIES)}) nor a device here: {error}"
        ) from error
    return name


def map_of_plan(model: nn.Module, made: Plan, arguments: PlanArguments) -> ResolvedMap:
    """Return the map of a plan.

    Args:
        model: The model to be dispatched.
        made: The plan.
        arguments: Arguments that it was given with, or made with.
    """
    check_device_map(model, made.device_map)
    # Lookup tables run on their storage device in any case, so they need no entry.
    modules = dict(model.named_modules())
    execution = {
        part.name: part.runs_on
        for part in made.parts
        if not is_accelerator(part.device)
        and part.runs_on != made.main_device != HOST
        and not (part.name in modules and is_lookup(modules[part.name]))
    }
    resolved = ResolvedMap(dict(made.device_map), made, made.main_device, execution, made.computed_below, arguments)
    _check_present(resolved.placement)
    return resolved


def _check_present(placement: DeviceMapLookup) -> None:
    """Raise DeviceError if this machine lacks a device of the map, one that a part runs on, or the main device."""
    for device in (*placement.devices.values(), *placement.execution.values(), placement.main_device):
        check_present(device)


def whole_classes(
    model: nn.Module, no_split: Collection[str] | None, preload: Collection[str] | None
) -> Collection[str] | None:
    """Return the classes whose modules are never split: `no_split`, or the detected ones if it is None, and `preload`.
    None if neither is given."""
    if no_split is None and not preload:
        return None
    found = find_no_split_classes(model) if no_split is None else no_split
    return {*found, *(preload or ())}
