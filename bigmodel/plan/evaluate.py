"""The one place that says what a placement costs each device. Planner, search, tests and reports all ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..devices import DISK, HOST
from ..profile import Profile
from ..profile.quantized import offloaded_bytes, quantized_bytes, staging_bytes
from .budgets import Key, is_accelerator
from .window import read_ahead_window, staging

STEP = "decode"
"""Name of the phase that is a step of generation."""


@dataclass(frozen=True)
class Assignment:
    """Where every unit of a profile is held and where it runs, by position.

    Attributes:
        held: device key of each unit's weights.
        runs: device key on which each unit runs.
        main: where inputs are, and where streamed units run.
        slots: how many slots there are on `main`.
        slot_bytes: bytes of one slot.
        stream_buffers: buffers of a unit lie with its weights, and not where it runs.
        computed_below: for units that are streamed to `main` for prompts and computed on the host in steps of
            generation, by position: calls of fewer tokens than this are computed. Their buffers lie with their weights.
    """

    held: tuple[Key, ...]
    runs: tuple[Key, ...]
    main: Key
    slots: int = 0
    slot_bytes: int = 0
    stream_buffers: bool = False
    computed_below: Mapping[int, int] = field(default_factory=dict)

    def in_steps(self) -> Assignment:
        """Return where everything is held and runs in a step of generation."""
        if not self.computed_below:
            return self
        runs = tuple(HOST if index in self.computed_below else key for index, key in enumerate(self.runs))
        return replace(self, runs=runs, computed_below={})

    def streamed(self, index: int) -> bool:
        """Whether unit `index` is copied to an accelerator each time it runs."""
        return is_accelerator(self.runs[index]) and not is_accelerator(self.held[index])


@dataclass(frozen=True)
class DeviceUse:
    """Predicted bytes on one device, by purpose."""

    weights: int = 0
    buffers: int = 0
    kv_cache: int = 0
    activations: int = 0
    slots: int = 0

    @property
    def total(self) -> int:
        """All of it: the peak."""
        return self.weights + self.buffers + self.kv_cache + self.activations + self.slots


def device_uses(profile: Profile, assignment: Assignment) -> dict[Key, DeviceUse]:
    """Return what an assignment takes on every device that holds or runs something."""
    weights, buffers = _stored(profile, assignment)
    kv, peaks = _kv_cache(profile, assignment), _peaks(profile, assignment)
    found = {}
    for device in dict.fromkeys([*weights, *buffers, *peaks]):
        cache = kv.get(device, 0)
        found[device] = DeviceUse(
            weights=weights.get(device, 0),
            buffers=buffers.get(device, 0),
            kv_cache=cache,
            activations=max(peaks.get(device, 0) - cache, 0),
            slots=_slots(profile, assignment, device),
        )
    return found


def _kv_cache(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the bytes of KV cache by device; what moves between prompt and step counts on both."""
    found: dict[Key, int] = {}
    for index, nbytes in enumerate(profile.kv_cache):
        for key in {assignment.runs[index], *([HOST] if index in assignment.computed_below else [])}:
            found[key] = found.get(key, 0) + nbytes
    return found


def _peaks(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the most bytes of activations and KV cache by device."""
    first = assignment.held[profile.first] if assignment.held else assignment.main
    brought_to = HOST if first == DISK else first

    def peaks(of: Assignment, over: Profile) -> dict[Key, int]:
        return over.dynamic_peaks(dict(enumerate(of.runs)), of.main, brought_to=brought_to)

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


def _slots(profile: Profile, assignment: Assignment, device: Key) -> int:
    """Return bytes on `device` that weights held elsewhere take turns in."""
    slots = 0
    if device == assignment.main:
        streamed_units = [unit for index, unit in enumerate(profile.units) if assignment.streamed(index)]
        slots = assignment.slots * assignment.slot_bytes + staging_bytes(streamed_units, profile.offload_dtype)
    if device != HOST or not profile.phases:
        return slots
    places = zip(profile.units, assignment.held, assignment.runs, strict=True)
    viewed = [
        (unit.weights if runs == HOST else offloaded_bytes(unit, profile.offload_dtype), runs)
        for unit, held, runs in places
        if held == DISK and not unit.is_lookup
    ]
    computed = [nbytes for nbytes, runs in viewed if runs == HOST]
    streamed = [nbytes for nbytes, runs in viewed if runs != HOST]
    return slots + read_ahead_window(computed) + staging(streamed)


def _stored(profile: Profile, assignment: Assignment) -> tuple[dict[Key, int], dict[Key, int]]:
    """Return bytes of parameters and of buffers by device, each storage once per device."""
    weights: dict[Key, int] = {}
    buffers: dict[Key, int] = {}
    seen: set[tuple[Key, int, bool]] = set()
    parameters = {s for unit in profile.units for s, spec in unit.storages.items() if not spec.is_buffer}
    for index, unit in enumerate(profile.units):
        for storage, spec in unit.storages.items():
            is_buffer = storage not in parameters
            moves = is_buffer and not assignment.stream_buffers and index not in assignment.computed_below
            device = assignment.runs[index] if moves else assignment.held[index]
            quantized = profile.offload_dtype is not None and not is_buffer and assignment.streamed(index)
            if (device, storage, quantized) not in seen:
                seen.add((device, storage, quantized))
                books = buffers if is_buffer else weights
                own = quantized_bytes(spec.shape, spec.dtype, profile.offload_dtype) if quantized else spec.nbytes
                books[device] = books.get(device, 0) + own
    return weights, buffers


def over_budget(uses: Mapping[Key, DeviceUse], budgets: Mapping[Key, int]) -> dict[Key, int]:
    """Return by how many bytes each device passes its budget; the disk has none unless it is given."""
    found = {}
    for device, use in uses.items():
        budget = budgets.get(device, use.total if device == DISK else 0)
        if use.total > budget:
            found[device] = use.total - budget
    return found


def host_only(profile: Profile) -> Assignment:
    """Return the assignment in which the CPU holds and runs everything."""
    everywhere = (HOST,) * len(profile.units)
    return Assignment(everywhere, everywhere, HOST)
