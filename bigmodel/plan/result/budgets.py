"""Budgets to plan with, also for a machine that is not this one, and the error for a model that does not fit them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import isfinite

from ...devices import (
    DISK,
    HOST,
    DeviceLike,
    accelerators,
    device_key,
    format_size,
    free_memory_bytes,
    get_max_memory,
    memory_allocated,
    normalize_device,
    parse_size,
    virtual,
)
from ...devices.memory import CachingMemory, budget_items, caching_memory
from ...errors import BudgetError, DeviceError, PlanError, SizeError
from ...limits import PLANNED_SHARE, UNKNOWN_SHARE
from ...profile.machine.machine import MachineProfile
from ...profile.machine.probe import known_machine

Key = int | str
"""A device as plans and device maps name it: a number for an accelerator, or "cpu", "disk", "mps", "cuda:0", ..."""


def is_accelerator(key: Key) -> bool:
    """Whether a key names an accelerator, of this machine or another."""
    return key not in (HOST, DISK, "meta")


def device_name(key: Key) -> str:
    """Return the canonical name of a device key; `cuda:N` for number N where this machine has no accelerator."""
    if key in (HOST, DISK):
        return HOST
    if isinstance(key, int) and not accelerators():
        return f"cuda:{key}"
    return normalize_device(key)


def whole_bytes(max_memory: Mapping[DeviceLike, int | str] | None) -> Mapping[DeviceLike, int | str] | None:
    """Return budgets with fractions of bytes rounded down: callers may give shares of the free bytes."""
    if not isinstance(max_memory, Mapping):
        return max_memory
    return {key: int(size) if isinstance(size, float) and isfinite(size) else size for key, size in max_memory.items()}


def read_budgets(max_memory: Mapping[DeviceLike, int | str] | None = None) -> dict[Key, int]:
    """Return bytes by device key: accelerators ascending, then "mps", "cpu", "disk".

    As `get_max_memory`, but on a machine without accelerators a number means one of another machine: plans may be made
    on one machine for another.

    Args:
        max_memory: budgets by device; None: what is free here.

    Raises:
        SizeError: `max_memory` is no mapping, a budget is not a size, or a device is named twice.
        DeviceError: a key names no device.
    """
    if max_memory is None or accelerators():
        return get_max_memory(max_memory)
    numbered: dict[Key, int] = {}
    others: dict[DeviceLike, int | str] = {}
    for device, size in budget_items(max_memory):
        number = _number(device)
        if number is None:
            others[device] = size
        elif number in numbered:
            raise SizeError(f"max_memory names device {number} twice; give one budget")
        else:
            numbered[number] = _size(device, size)
    return {**dict(sorted(numbered.items())), **get_max_memory(others)}


def checked_main(main_device: DeviceLike | None, budgets: Mapping[Key, int]) -> Key | None:
    """Return the key of the given main device; None for None.

    Raises:
        PlanError: it has no budget.
    """
    if main_device is None:
        return None
    key = main_device if type(main_device) is int else device_key(main_device)
    if budgets.get(key, 0) <= 0:
        raise PlanError(f"main_device is {key!r}, but max_memory gives it no budget")
    return key


def caching_memories(devices: Iterable[Key], machine: MachineProfile | None = None) -> dict[Key, CachingMemory]:
    """Return the bytes beside tensors that each device with a caching allocator takes.

    Args:
        devices: their keys.
        machine: the machine to plan for; None: this one, as it was measured, else by nominal figures. Of a device that
            is in neither, nothing is known: its tensors are counted as they are.
    """
    found: dict[Key, CachingMemory] = {}
    present = set(accelerators())
    for key in filter(is_accelerator, devices):
        name = device_name(key)
        memory = None if machine is None else machine.caching_memory(name)
        if memory is None and name in present and caching_memory(name) is not None:
            memory = _measured(name) or caching_memory(name)
        if memory is not None:
            found[key] = memory
    return found


def within_devices(
    budgets: Mapping[Key, int], caching: Mapping[Key, CachingMemory]
) -> tuple[dict[Key, int], tuple[str, ...]]:
    """Return budgets none of which is more than its device can give, and a note of each that was lowered.

    What a device with a caching allocator cannot give are its context and what other programs hold. Devices of other
    machines, and those that do not cache, keep their budgets.

    Args:
        budgets: bytes by device key.
        caching: devices whose allocators cache.
    """
    found, notes = dict(budgets), []
    present = set(accelerators())
    for key in caching:
        if device_name(key) not in present:
            continue
        most = free_memory_bytes(key) + memory_allocated(key)
        if budgets[key] > most:
            found[key] = most
            notes.append(
                f"device {key!r} is planned with {format_size(most)} of its {format_size(budgets[key])}: "
                "its context and other programs take the rest"
            )
    return found, tuple(notes)


def _measured(name: str) -> CachingMemory | None:
    """Return what a device of this machine was measured to take; None if it was not, or may have changed since."""
    known = None if name.startswith(virtual.TYPE) else known_machine()
    return None if known is None else known.caching_memory(name)


def with_headroom(budgets: Mapping[Key, int]) -> dict[Key, int]:
    """Return `PLANNED_SHARE` of the budgets: the rest is for other programs, device contexts and fragmentation."""
    return {key: size if key == DISK else int(size * PLANNED_SHARE) for key, size in budgets.items()}


def without_accelerators(budgets: Mapping[Key, int]) -> dict[Key, int]:
    """Return the budgets with nothing allowed on accelerators."""
    return {key: 0 if is_accelerator(key) else size for key, size in budgets.items()}


def without_unknown_share(budgets: Mapping[Key, int]) -> dict[Key, int]:
    """Return the budgets without the share of the accelerators' that is kept for inputs larger than those measured."""
    return {key: int(size * (1 - UNKNOWN_SHARE)) if is_accelerator(key) else size for key, size in budgets.items()}


def device_type_of(budgets: Mapping[Key, int]) -> str:
    """Return the type of device whose kernels a plan with these budgets runs.

    It is that of the first accelerator with a budget, "cpu" if there is none or none of that type on this machine.
    """
    present = {name.partition(":")[0] for name in accelerators()}
    for key, size in budgets.items():
        if size > 0 and is_accelerator(key):
            if isinstance(key, int) and not present:
                return HOST
            kind = normalize_device(key).partition(":")[0]
            return kind if kind in present else HOST
    return HOST


def _number(device: DeviceLike) -> int | None:
    if isinstance(device, bool) or not isinstance(device, (int, str)):
        return None
    if isinstance(device, str) and not device.strip().isdecimal():
        return None
    if int(device) < 0:
        raise DeviceError(f"device {device} is negative; accelerators count from 0")
    return int(device)


def _size(device: DeviceLike, size: int | str) -> int:
    try:
        return parse_size(size)
    except SizeError as error:
        raise SizeError(f"max_memory[{device!r}]: {error}") from None


Fits = Callable[[Mapping[Key, int]], bool]
"""Whether something fits when the budgets are these."""


def smallest_budget(budgets: Mapping[Key, int], device: Key, enough: int, fits: Fits) -> int | None:
    """Return the smallest budget of `device` with which something fits, the others as they are.

    Args:
        budgets: bytes by device key.
        device: whose budget may grow.
        enough: a budget that is large enough if any is.
        fits: called with changed budgets.

    Returns:
        Bytes; None if no budget of this device alone will do.
    """
    low, high = budgets.get(device, 0), max(enough, budgets.get(device, 0))
    if not fits({**budgets, device: high}):
        return None
    return low + bisect_left(range(low, high), True, key=lambda size: fits({**budgets, device: size}))


def budget_error(budgets: Mapping[Key, int], needed: int, fits: Fits) -> BudgetError:
    """Return the error for a model that does not fit. Its message names the smallest budget of each device that would
    do; they are searched for when it is read.

    Args:
        budgets: bytes by device key, as planned with.
        needed: bytes that are enough on any one device.
        fits: whether the model fits under other budgets.
    """
    return BudgetError(partial(_shortage, dict(budgets), needed, fits))


def _shortage(budgets: Mapping[Key, int], needed: int, fits: Fits) -> str:
    remedies = []
    for device, size in budgets.items():
        enough = smallest_budget(budgets, device, needed, fits)
        if enough is not None:
            remedies.append(f"{device!r}: {format_size(enough)} ({enough} bytes, {format_size(enough - size)} more)")
    given = ", ".join(f"{device!r}: {format_size(size)}" for device, size in budgets.items())
    if remedies:
        advice = f"one of these budgets would do: {'; '.join(remedies)}"
    else:
        advice = "no single budget would do: raise several, or allow 'disk'"
    return f"the model does not fit the budgets ({given}); {advice}"
