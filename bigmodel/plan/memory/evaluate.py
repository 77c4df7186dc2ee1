"""Bytes that an assignment takes on each device. Planner, search, tests and reports all use this computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...devices import DISK, HOST
from ...profile import Profile
from ...profile.model.quantized import offloaded_bytes, quantized_bytes
from ..result.budgets import Key, is_accelerator
from ..result.plan import DevicePlan
from .assignment import STEP, Assignment
from .slots import expert_capacities, slots_on
from .usage import ACTIVATIONS, BUFFERS, KV_CACHE, SLOTS, WEIGHTS, MemoryUsage


def device_uses(profile: Profile, assignment: Assignment) -> dict[Key, DevicePlan]:
    """Return what an assignment takes on every device that holds or runs something, whatever its budget.

    Kernels' workspace counts among the activations; `with_workspace_apart` tells them apart.
    """
    return memory_usage(profile, assignment).device_plans()


def memory_usage(profile: Profile, assignment: Assignment) -> MemoryUsage:
    """Return the bytes of an assignment by device and purpose; activations are replayed from the traces."""
    usage = MemoryUsage(assignment.main, staging_bytes=assignment.staging_bytes)
    _add_stored(usage, profile, assignment)
    peaks = _peaks(profile, assignment)
    for device, nbytes in _kv_cache(profile, assignment).items():
        usage.add(device, KV_CACHE, nbytes)
    for device, peak in peaks.items():
        usage.add(device, ACTIVATIONS, max(peak - usage.of(device, KV_CACHE), 0))
    for device in usage.devices:
        usage.add(device, SLOTS, slots_on(profile, assignment, device))
    for unit, storage, execution in zip(profile.units, assignment.storage, assignment.execution, strict=True):
        if storage == DISK and not unit.is_lookup and profile.phases:
            if execution == HOST:
                usage.add_viewed(unit.weights - unit.expert_weights)
            else:
                usage.add_staged(offloaded_bytes(unit, profile.offload_dtype))
    return usage


def with_workspace_apart(
    uses: Mapping[Key, DevicePlan], profile: Profile, assignment: Assignment
) -> dict[Key, DevicePlan]:
    """Return what `device_uses` found, with what kernels take for themselves told from activations; totals stay."""
    bare = replace(profile, phases=tuple(phase.without_workspace() for phase in profile.phases))
    found = {}
    for device, without in device_uses(bare, assignment).items():
        more = uses[device].activations - without.activations
        found[device] = replace(uses[device], activations=without.activations, workspace=more)
    return found


def _kv_cache(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the bytes of KV cache by device; what moves between prompt and step counts on both."""
    found: dict[Key, int] = {}
    for index, nbytes in enumerate(profile.kv_cache):
        for key in {assignment.execution[index], *([HOST] if index in assignment.computed_below else [])}:
            found[key] = found.get(key, 0) + nbytes
    return found


def _peaks(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the most bytes of activations and KV cache by device."""
    first = assignment.storage[profile.first] if assignment.storage else assignment.main
    input_device = HOST if first == DISK else first

    def peaks(of: Assignment, over: Profile) -> dict[Key, int]:
        slots = {at: room.slots for at, room in expert_capacities(over, of).items()}
        return over.dynamic_peaks(dict(enumerate(of.execution)), of.main, input_device=input_device, experts=slots)

    if not assignment.computed_below:
        return peaks(assignment, profile)
    prompts = replace(profile, phases=tuple(phase for phase in profile.phases if phase.name != STEP))
    steps = replace(profile, phases=tuple(phase for phase in profile.phases if phase.name == STEP))
    found = peaks(assignment, prompts)
    # When the first step begins, the cache still lies where the prompt was computed.
    begun = {key: peak for key, peak in peaks(assignment, steps).items() if is_accelerator(key)}
    for more in (begun, peaks(assignment.in_steps(), steps)):
        found.update({key: max(found.get(key, 0), peak) for key, peak in more.items()})
    return found


def _add_stored(usage: MemoryUsage, profile: Profile, assignment: Assignment) -> None:
    """Add the bytes of parameters and of buffers, each storage once per device."""
    seen: set[tuple[Key, int, bool]] = set()
    parameters = {s for unit in profile.units for s, spec in unit.storages.items() if not spec.is_buffer}
    for index, unit in enumerate(profile.units):
        for storage, spec in unit.storages.items():
            is_buffer = storage not in parameters
            moves = is_buffer and not assignment.stream_buffers and index not in assignment.computed_below
            device = assignment.execution[index] if moves else assignment.storage[index]
            quantized = profile.offload_dtype is not None and not is_buffer and assignment.streamed(index)
            if (device, storage, quantized) not in seen:
                seen.add((device, storage, quantized))
                own = quantized_bytes(spec.shape, spec.dtype, profile.offload_dtype) if quantized else spec.nbytes
                usage.add(device, BUFFERS if is_buffer else WEIGHTS, own)
