"""What people may give as a device map, spelt out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from ...devices import HOST, DeviceLike, device_key
from ...errors import DeviceError, PlanError
from ...plan import OFFLOADS, STRATEGIES, Plan, plan
from ...profile import find_no_split_classes
from .tensors import Placement

DeviceMap: TypeAlias = "str | int | torch.device | Mapping[str, DeviceLike] | Plan"
"""A strategy's name (``"auto"``, ...), one device for everything, a device by module name, or a plan."""


@dataclass(frozen=True)
class ResolvedMap:
    """A device map spelt out.

    Attributes:
        devices: Where each module is held.
        main_device: Where offloaded modules run; None: the first accelerator of the map, else the host.
        execution: Those offloaded modules that run on the host, beside an accelerator that others run on.
        plan: What it was taken from.
        computed_below: For streamed modules that the host computes in calls of few tokens: of fewer than how many.
    """

    devices: dict[str, DeviceLike]
    main_device: DeviceLike | None = None
    execution: Mapping[str, DeviceLike] = field(default_factory=dict)
    plan: Plan | None = None
    computed_below: Mapping[str, int] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, int | str]:
        """Where each module is held, as device keys."""
        return {name: device_key(device) for name, device in self.devices.items()}

    @property
    def placement(self) -> Placement:
        """Where everything goes by it."""
        return Placement(self.devices, self.main_device, self.execution, self.computed_below)


def resolve_device_map(
    model: nn.Module,
    device_map: DeviceMap,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    main_device: DeviceLike | None = None,
    offload: str = "stream",
    offload_dtype: str | None = None,
    per_pass: bool = True,
    **shapes: Any,
) -> ResolvedMap:
    """Return `device_map` spelt out, planning it where only a strategy is named.

    Args:
        model: What it is for.
        device_map: As `dispatch_model` takes it.
        max_memory: Budgets by device, for the named strategies.
        no_split_module_classes: Classes whose modules stay in one piece; None finds them.
        main_device: Where offloaded modules run, if not where the map or the plan says.
        offload: ``"stream"``, ``"compute"`` or ``"auto"``, as `dispatch_model` takes it.
        offload_dtype: What streamed weights are quantised to on their way.
        per_pass: With ``"auto"``, a module may be streamed for prompts and computed on the host in steps.
        shapes: `batch_size`, `context_length` and `dtype` that a plan is made for.

    Raises:
        DeviceError: `device_map` is a word that names neither a strategy nor a device.
        PlanError: There is no such way to offload, or it does not go with this map.
        BudgetError: The model does not fit.
    """
    if offload not in OFFLOADS:
        raise PlanError(f"offload is {offload!r}; use one of {', '.join(OFFLOADS)}")
    if isinstance(device_map, Plan):
        return _planned(model, device_map, main_device)
    if isinstance(device_map, str) and device_map in STRATEGIES:
        if offload != "stream" and device_map != "auto":
            raise PlanError(
                f"offload={offload!r} goes with device_map='auto' or a device by module, not {device_map!r}"
            )
        made = plan(
            model,
            max_memory,
            device_map,
            no_split_module_classes=no_split_module_classes,
            main_device=main_device,
            offload_dtype=offload_dtype,
            # Whether the host should compute a part depends on measured speeds.
            objective=None if offload == "stream" else "latency",
            offload=offload,
            per_pass=per_pass,
            **shapes,
        )
        return _planned(model, made, main_device)
    devices = dict(device_map) if isinstance(device_map, Mapping) else {"": _device(device_map)}
    if offload == "auto":
        raise PlanError(
            "offload='auto' is decided by a plan: give device_map='auto', or a plan made with offload='auto'"
        )
    return ResolvedMap(devices, main_device, dict.fromkeys(devices, HOST) if offload == "compute" else {})


def _device(name: DeviceLike) -> DeviceLike:
    """Return `name` if it names a device, which somebody who mistyped a strategy's name is told it does not."""
    try:
        device_key(name)
    except DeviceError as error:
        raise DeviceError(
            f"device_map is {name!r}, which is neither a strategy ({', '.join(STRATEGIES)}) nor a device here: {error}"
        ) from error
    return name


def _planned(model: nn.Module, made: Plan, main_device: DeviceLike | None) -> ResolvedMap:
    # Tables that rows are looked up in run on the host by themselves, and nothing around them need know.
    modules = dict(model.named_modules())
    on_host = {name: HOST for name, key in made.execution.items() if key == HOST != made.main_device}
    execution = {name: key for name, key in on_host.items() if not isinstance(modules.get(name), nn.Embedding)}
    main = made.main_device if main_device is None else main_device
    return ResolvedMap(dict(made.device_map), main, execution, made, made.computed_below)


def whole_classes(
    model: nn.Module, no_split: Collection[str] | None, preload: Collection[str] | None
) -> Collection[str] | None:
    """Return the classes whose modules stay in one piece: those named as not to be split, else those found by
    themselves, and those whose weights are to be loaded as a whole. None when nothing was named."""
    if no_split is None and not preload:
        return None
    found = find_no_split_classes(model) if no_split is None else no_split
    return {*found, *(preload or ())}
