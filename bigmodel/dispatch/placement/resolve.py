"""What people may give as a device map, spelt out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from ...devices import DISK, HOST, DeviceLike, device_key
from ...errors import DeviceError, PlanError
from ...plan import STRATEGIES, Plan, check_device_map, plan
from ...profile import find_no_split_classes, profile_units
from ...profile.model.units import is_lookup
from .map_plan import plan_of_map
from .options import PlanArguments
from .tensors import DeviceMapLookup

DeviceMap: TypeAlias = "str | int | torch.device | Mapping[str, DeviceLike] | Plan"
"""A strategy's name (``"auto"``, ...), one device for everything, a device by module name, or a plan."""


@dataclass(frozen=True)
class ResolvedMap:
    """A device map spelt out.

    Attributes:
        devices: Where each module is held.
        plan: What it was taken from, or what was made of it: how weights get to where they run, and what that takes.
        main_device: Where offloaded modules run; None: the first accelerator of the map, else the host.
        execution: Those offloaded modules that run on the host, beside an accelerator that others run on.
        computed_below: For streamed modules that the host computes in calls of few tokens: of fewer than how many.
    """

    devices: dict[str, DeviceLike]
    plan: Plan
    main_device: DeviceLike | None = None
    execution: Mapping[str, DeviceLike] = field(default_factory=dict)
    computed_below: Mapping[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, int | str]:
        """Where each module is held, as device keys."""
        return {name: device_key(device) for name, device in self.devices.items()}

    @property
    def reads_ahead(self) -> bool:
        """Whether what the host computes with is brought into its budget in turns, as some of it lies on disk."""
        on_disk = DISK in self.placement.devices.values()
        return on_disk and self.placement.main_device == HOST and self.plan.resident_limit is not None

    @property
    def placement(self) -> DeviceMapLookup:
        """Where everything goes by it."""
        return DeviceMapLookup(self.devices, self.main_device, self.execution, self.computed_below)


def resolve_device_map(
    model: nn.Module, device_map: DeviceMap, arguments: PlanArguments | None = None, **planned: Any
) -> ResolvedMap:
    """Return `device_map` spelt out, with its plan: the one that was given, or one that is made here.

    Args:
        model: What it is for.
        device_map: As `dispatch_model` takes it.
        arguments: What was asked for beside it.
        planned: `batch_size`, `context_length` and `per_pass`, as `plan` takes them, where only a strategy is named.

    Raises:
        DeviceError: `device_map` is a word that names neither a strategy nor a device.
        DeviceMapError: It does not cover the model.
        PlanError: An argument contradicts the plan, or does not go with this map.
        BudgetError: The model does not fit.
    """
    asked = arguments or PlanArguments()
    if isinstance(device_map, Plan):
        asked.check(device_map)
        _check_parts(model, device_map, asked.no_split_module_classes)
        return _planned(model, device_map)
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return _planned(model, _made(model, device_map, asked, planned))
    devices = dict(device_map) if isinstance(device_map, Mapping) else {"": _device(device_map)}
    if asked.offload == "auto":
        raise PlanError(
            "offload='auto' is decided by a plan: give device_map='auto', or a plan made with offload='auto'"
        )
    execution = dict.fromkeys(devices, HOST) if asked.offload == "compute" else {}
    return resolve_given(model, devices, asked, execution)


def resolve_given(
    model: nn.Module,
    devices: Mapping[str, DeviceLike],
    arguments: PlanArguments | None = None,
    execution: Mapping[str, DeviceLike] | None = None,
    computed_below: Mapping[str, int] | None = None,
) -> ResolvedMap:
    """Return a map of devices that somebody gave, with the plan that it makes.

    Args:
        model: What it is for.
        devices: Where each module is held.
        arguments: What was asked for beside it.
        execution: As for `ResolvedMap`.
        computed_below: As for `ResolvedMap`.

    Raises:
        DeviceMapError: It does not cover the model.
    """
    asked = arguments or PlanArguments()
    placement = DeviceMapLookup(devices, asked.main_device, execution, computed_below)
    plan = plan_of_map(model, placement, asked)
    return ResolvedMap(dict(devices), plan, asked.main_device, execution or {}, computed_below or {})


def _made(model: nn.Module, strategy: str, asked: PlanArguments, planned: dict[str, Any]) -> Plan:
    common: dict[str, Any] = {
        "max_memory": asked.max_memory,
        "main_device": asked.main_device,
        "no_split_module_classes": asked.no_split_module_classes,
        "offload_buffers": bool(asked.offload_buffers),
        "offload_dtype": asked.offload_dtype,
        "expert_cache": asked.expert_cache,
        "pinned_memory": asked.pinned_memory,
        "dtype": asked.dtype,
    }
    offload = asked.offload or "stream"
    if offload != "stream" and strategy != "auto":
        raise PlanError(f"offload={offload!r} goes with device_map='auto' or a device by module, not {strategy!r}")
    # Whether the host should compute a part depends on measured speeds.
    objective = None if offload == "stream" else "latency"
    return plan(model, strategy=strategy, objective=objective, offload=offload, **common, **planned)


def _check_parts(model: nn.Module, given: Plan, classes: Collection[str] | None) -> None:
    """Raise PlanError if `classes` are to stay whole and the plan cuts the model otherwise."""
    if classes is None:
        return
    parts = {part.name for part in given.parts}
    others = [unit for unit in profile_units(model, no_split_module_classes=classes) if unit.tensors]
    differing = next((unit.name for unit in others if unit.name not in parts), None)
    if differing is not None:
        raise PlanError(
            f"no_split_module_classes is {sorted(classes)}, by which {differing!r} is one part, but the plan has "
            f"{len(parts)} others: leave the argument out, or make the plan with it"
        )


def _device(name: DeviceLike) -> DeviceLike:
    """Return `name` if it names a device, which somebody who mistyped a strategy's name is told it does not."""
    try:
        device_key(name)
    except DeviceError as error:
        raise DeviceError(
            f"device_map is {name!r}, which is neither a strategy ({', '.join(STRATEGIES)}) nor a device here: {error}"
        ) from error
    return name


def _planned(model: nn.Module, made: Plan) -> ResolvedMap:
    check_device_map(model, made.device_map)
    # Tables that rows are looked up in run on the host by themselves, and nothing around them need know.
    modules = dict(model.named_modules())
    on_host = [name for name, key in made.execution.items() if key == HOST != made.main_device]
    execution = {name: HOST for name in on_host if not (name in modules and is_lookup(modules[name]))}
    return ResolvedMap(dict(made.device_map), made, made.main_device, execution, made.computed_below)


def whole_classes(
    model: nn.Module, no_split: Collection[str] | None, preload: Collection[str] | None
) -> Collection[str] | None:
    """Return the classes whose modules stay in one piece: those named as not to be split, else those found by
    themselves, and those whose weights are to be loaded as a whole. None when nothing was named."""
    if no_split is None and not preload:
        return None
    found = find_no_split_classes(model) if no_split is None else no_split
    return {*found, *(preload or ())}
