"""`Assignment`: storage and execution device of every unit of a model, its bytes on each device, and its `Plan`.

Planner, search, tests and reports all use this computation. From top to bottom: the assignment; its bytes by device and
purpose (`memory_usage`), with what replays of traces need to know of it (`replay_options`); its plan (`assemble`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...devices import DISK, HOST, total_host_bytes
from ...devices.memory import CachingMemory
from ...devices.virtual.allocator import SMALL_SEGMENT
from ...limits import GRADIENT_BYTES, PINNED_SHARE, READERS, STAGING_BYTES
from ...profile import Profile, UnitProfile
from ...profile.model.quantized import quantized_bytes
from ...quantized.host_kernels import EXACT, PACKED
from ..result.budgets import Key, is_accelerator
from ..result.expert_split import ExpertSplit
from ..result.plan import DevicePlan, Part, Plan, Prediction
from .host_kv import KV_SLOTS, fetched_kv, gathered_kv, kv_on_disk, kv_on_host, kv_slots
from .micro_batches import micro_batch_peaks, reserve_micro_batches
from .reserved import ReplayOptions, ReservedMemory, block_bytes, replay_reserved
from .staging import upload_bytes
from .usage import (
    ACTIVATIONS,
    BUFFERS,
    KV_CACHE,
    SLOTS,
    UNUSED,
    WEIGHTS,
    WORKSPACE,
    ExpertCapacity,
    MemoryUsage,
    PassingUnit,
    passing_unit,
)

STEP = "decode"
"""Name of the phase that is a step of generation."""

KnownUnits = dict[tuple[int, bool], PassingUnit]
"""Passing units by position, and by whether their buffers are streamed."""


@dataclass(frozen=True)
class Assignment:
    """Storage and execution device of every unit of a profile, by position.

    Attributes:
        storage: device key on which each unit lies.
        execution: device key on which each unit runs.
        main: device of the inputs, of operations between units, and of experts that are fetched one by one.
        slots: number of slots of each accelerator that units are streamed to, at most.
        slot_bytes: bytes of the largest slot.
        stream_buffers: buffers of a unit are stored with its weights, and not where it runs.
        expert_cache: bytes of each device for experts that are fetched one by one; None: as many as streaming whole
            units of them would take.
        expert_split: rates by which the host computes some of the experts that are not in the cache; None: none.
        staging_bytes: bytes of the host through which units on disk reach one accelerator, at most.
        readers: number of threads that read from disk for one accelerator.
        computed_below: for units that are streamed to `main` for prompts and computed on the host in steps of
            generation, by position: calls of fewer tokens than this are computed. Their buffers are stored with their
            weights.
        caching: devices whose allocators round tensors and reserve segments; the others take bytes as they are.
        limits: bytes that these allocators may reserve; a missing one as many as it likes.
    """

    storage: tuple[Key, ...]
    execution: tuple[Key, ...]
    main: Key
    slots: int = 0
    slot_bytes: int = 0
    stream_buffers: bool = False
    expert_cache: int | None = None
    expert_split: ExpertSplit | None = None
    staging_bytes: int = STAGING_BYTES
    readers: int = READERS
    computed_below: Mapping[int, int] = field(default_factory=dict)
    caching: Mapping[Key, CachingMemory] = field(default_factory=dict)
    limits: Mapping[Key, int] = field(default_factory=dict)

    def in_steps(self) -> Assignment:
        """Return the assignment during a step of generation."""
        if not self.computed_below:
            return self
        execution = tuple(HOST if index in self.computed_below else key for index, key in enumerate(self.execution))
        return replace(self, execution=execution, computed_below={})

    def packed(self, index: int) -> bool:
        """Whether RAM holds unit `index` and the host computes it in every call, packed if that is asked for."""
        return self.storage[index] == self.execution[index] == HOST

    @cached_property
    def is_spread(self) -> bool:
        """Whether units are streamed to several accelerators."""
        return len({key for index, key in enumerate(self.execution) if self.streamed(index)}) > 1

    @cached_property
    def is_resident(self) -> bool:
        """Whether every unit is held by the accelerator that it runs on."""
        return self.storage == self.execution and all(map(is_accelerator, self.execution))

    def streamed(self, index: int) -> bool:
        """Whether unit `index` is copied to an accelerator each time it runs."""
        return is_accelerator(self.execution[index]) and not is_accelerator(self.storage[index])


def host_only(profile: Profile) -> Assignment:
    """Return the assignment in which the CPU holds and runs everything."""
    everywhere = (HOST,) * len(profile.units)
    return Assignment(everywhere, everywhere, HOST)


def device_uses(profile: Profile, assignment: Assignment) -> dict[Key, DevicePlan]:
    """Return the bytes of an assignment on every device that stores or runs something, without budgets.

    The workspace of kernels is counted as activations; `with_workspace_apart` separates them.
    """
    return memory_usage(profile, assignment).device_plans()


def memory_usage(profile: Profile, assignment: Assignment) -> MemoryUsage:
    """Return the bytes of an assignment by device and purpose; activations are replayed from the traces."""
    usage = _usage_of_tensors(profile, assignment)
    if assignment.caching:
        _add_reserved(usage, profile, assignment)
    return usage


def _usage_of_tensors(profile: Profile, assignment: Assignment) -> MemoryUsage:
    """Return `memory_usage` without the bytes that allocators reserve beyond tensors."""
    usage = passing_usage(profile.units, assignment, profile.offload_dtype, bool(profile.phases))
    for device, purpose, nbytes in _stored_bytes(profile, assignment):
        usage.add(device, purpose, nbytes)
    for device in assignment.caching:
        usage.add(device, SLOTS, sum(block_bytes(size) - size for size in usage.shared_tensors(device)))
    if profile.kv_on_host:
        through = assignment.staging_bytes, assignment.readers
        for device, purpose, nbytes in kv_on_host(profile, assignment.execution, assignment.caching, *through):
            usage.add(device, purpose, nbytes)
    for device, sizes in (gathered_kv(profile, assignment.execution) if profile.gathers_kv else {}).items():
        usage.add(device, ACTIVATIONS, sum(map(block_bytes, sizes) if device in assignment.caching else sizes))
    peaks = _peaks(profile, assignment)
    for device, nbytes in _kv_cache(profile, assignment).items():
        usage.add(device, KV_CACHE, nbytes)
    for device, peak in peaks.items():
        usage.add(device, ACTIVATIONS, max(peak - usage.of(device, KV_CACHE), 0))
    return usage


def passing_usage(
    units: Sequence[UnitProfile],
    assignment: Assignment,
    offload_dtype: str | None = None,
    reads: bool = False,
    known: KnownUnits | None = None,
) -> MemoryUsage:
    """Return only the bytes of the memory through which units pass that are not stored where they run.

    Args:
        units: as assigned.
        assignment: their devices.
        offload_dtype: as for `passing_unit`.
        reads: as for `passing_unit`; expert caches and slots do not depend on these two.
        known: passing units of another call with the same units, type and `reads`; new ones are added.
    """
    known = {} if known is None else known
    usage = MemoryUsage(
        assignment.main, assignment.slots, assignment.staging_bytes, assignment.expert_cache, assignment.readers
    )
    counts: dict[tuple[int, Key, Key], int] = {}
    passing: dict[int, PassingUnit] = {}
    for index, (unit, storage, execution) in enumerate(
        zip(units, assignment.storage, assignment.execution, strict=True)
    ):
        if storage != execution and not unit.is_lookup:
            with_buffers = assignment.stream_buffers or index in assignment.computed_below
            found = known.get((index, with_buffers))
            if found is None:
                found = known[index, with_buffers] = passing_unit(unit, offload_dtype, with_buffers, reads)
            kind = id(found), storage, execution
            passing[id(found)] = found
            counts[kind] = counts.get(kind, 0) + 1
    for (number, storage, execution), count in counts.items():
        usage.add_unit(passing[number], storage, execution, count)
    return usage


def expert_capacities(
    profile: Profile, assignment: Assignment, known: KnownUnits | None = None
) -> dict[tuple[int, int], ExpertCapacity]:
    """Return the cache capacity for experts fetched one by one, by positions of their unit and of the experts in it.

    Args:
        profile: the model.
        assignment: where its units are.
        known: as for `passing_usage`.
    """
    if not any(unit.experts for unit in profile.units):
        return {}
    usage = passing_usage(profile.units, assignment, known=known)
    capacities = {device: usage.expert_capacities(device) for device in (assignment.main, HOST)}
    fetched_to: dict[tuple[Key, Key], Key | None] = {}
    found = {}
    for index, (unit, option) in enumerate(
        zip(profile.units, zip(assignment.storage, assignment.execution, strict=True), strict=True)
    ):
        if not unit.experts:
            continue
        if option not in fetched_to:
            read = HOST if option == (DISK, HOST) else None
            fetched_to[option] = assignment.main if assignment.streamed(index) else read
        device = fetched_to[option]
        if device is not None:
            for position, experts in enumerate(unit.experts):
                found[index, position] = capacities[device][experts.slots]
    return found


def with_workspace_apart(
    uses: Mapping[Key, DevicePlan], profile: Profile, assignment: Assignment
) -> dict[Key, DevicePlan]:
    """Return the result of `device_uses` with the workspace of kernels separated from activations; totals are equal."""
    bare_usage = _usage_of_tensors(profile.without_workspace(), assignment)
    found = {}
    for device, use in uses.items():
        without = bare_usage.of(device, ACTIVATIONS)
        workspace = use.workspace + use.activations - without
        found[device] = replace(use, activations=without, workspace=workspace)
    return found


def _kv_cache(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the bytes of KV cache by device; a cache that moves between prompt and step counts on both."""
    found: dict[Key, int] = {}
    for index, nbytes in enumerate(profile.kv_cache):
        for key in {assignment.execution[index], *([HOST] if index in assignment.computed_below else [])}:
            found[key] = found.get(key, 0) + nbytes
    return found


def _kv_gather(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the bytes of KV cache of the unit that has most, by accelerator."""
    found: dict[Key, int] = {}
    for key, nbytes in zip(assignment.execution, profile.kv_cache):
        if is_accelerator(key) and nbytes:
            found[key] = max(found.get(key, 0), nbytes)
    return found


def _peaks(profile: Profile, assignment: Assignment) -> dict[Key, int]:
    """Return the peak bytes of activations and KV cache by device."""
    found: dict[Key, int] = {}
    packed = all_packed(profile, assignment)
    for of, over, accelerators_alone in passes_of(profile, assignment):
        peaks = over.dynamic_peaks(**replay_options(over, of), packed=packed)
        for key, peak in peaks.items():
            if is_accelerator(key) or not accelerators_alone:
                found[key] = max(found.get(key, 0), peak)
    if in_micro_batches(profile, assignment):
        for key, peak in micro_batch_peaks(profile, replay_options(profile, assignment)).items():
            found[key] = max(found.get(key, 0), peak)
    return found


def in_micro_batches(profile: Profile, assignment: Assignment) -> bool:
    """Whether a forward is computed in micro-batches: if that is asked for, where a model has stages."""
    if profile.micro_batch is None or not assignment.is_resident or len(set(assignment.execution)) < 2:
        return False
    return bool(profile.micro_batch.phases) and not profile.kv_on_host


def all_packed(profile: Profile, assignment: Assignment) -> bool:
    """Whether every unit that the host can compute packed is computed so. Otherwise activations count restored weights
    for all, which is more."""
    able = [index for index, unit in enumerate(profile.units) if unit.can_pack]
    return bool(able) and all(map(assignment.packed, able))


def passes_of(profile: Profile, assignment: Assignment) -> list[tuple[Assignment, Profile, bool]]:
    """Return the passes in order: where their units run, the phases, and whether only accelerators count."""
    if not assignment.computed_below:
        return [(assignment, profile, False)]
    prompts = replace(profile, phases=tuple(phase for phase in profile.phases if phase.name != STEP))
    steps = replace(profile, phases=tuple(phase for phase in profile.phases if phase.name == STEP))
    # When the first step begins, the cache still lies where the prompt was computed.
    return [(assignment, prompts, False), (assignment, steps, True), (assignment.in_steps(), steps, False)]


def replay_options(profile: Profile, assignment: Assignment) -> ReplayOptions:
    """Return where the events of a profile's traces happen under an assignment."""
    first = assignment.storage[profile.first] if assignment.storage else assignment.main
    return {
        "execution_devices": dict(enumerate(assignment.execution)),
        "main": assignment.main,
        "rounding": dict.fromkeys(assignment.caching, block_bytes),
        "input_device": HOST if first == DISK else first,
        "experts": {at: cache.slots for at, cache in expert_capacities(profile, assignment).items()},
        "split": None if assignment.expert_split is None else (assignment.expert_split.below, HOST),
        "offloaded": {at: HOST for at, key in enumerate(assignment.storage) if not is_accelerator(key)},
    }


def _add_reserved(usage: MemoryUsage, profile: Profile, assignment: Assignment) -> None:
    """Add what caching allocators reserve beyond tensors. Nothing is replayed if these are over a limit already."""
    memories = {device: ReservedMemory(assignment.limits.get(device)) for device in assignment.caching}
    for device, _, nbytes in stored_tensors(profile, assignment):
        if device in memories and nbytes:
            memories[device].take(nbytes)
    for device, memory in memories.items():
        fetched = kv_slots(profile, assignment.execution).get(device, []) if profile.kv_on_host else []
        gathered = gathered_kv(profile, assignment.execution).get(device, []) if profile.gathers_kv else []
        for nbytes in (*usage.shared_tensors(device), *fetched, *gathered):
            memory.take(nbytes)
        workspace = assignment.caching[device].workspace
        if workspace and profile.phases and device in assignment.execution:
            memory.take(workspace)
            usage.add(device, WORKSPACE, workspace)
    limits = assignment.limits
    if all(usage.total(device) <= limits[device] for device in memories if device in limits):
        for of, over, _ in passes_of(profile, assignment):
            replay_reserved(over, memories, replay_options(over, of))
    if in_micro_batches(profile, assignment):
        options = replay_options(profile, assignment)
        for device, nbytes in reserve_micro_batches(profile, memories, assignment.caching, options).items():
            usage.add(device, WORKSPACE, nbytes)
    for device, memory in memories.items():
        # One small segment more: the order of small tensors varies with what runs between the recorded forwards.
        spare = SMALL_SEGMENT if profile.phases and device in assignment.execution else 0
        if memory.peak + spare > usage.total(device):
            usage.add(device, UNUSED, memory.peak + spare - usage.total(device))
        if memory.limited:
            usage.limited.add(device)


def _stored_bytes(profile: Profile, assignment: Assignment) -> Iterator[tuple[Key, str, int]]:
    """Yield what `stored_tensors` does, as few numbers for each unit as possible."""
    separate = None if assignment.caching or profile.offload_dtype is not None else profile.separate_bytes
    if separate is None:
        yield from stored_tensors(profile, assignment)
        return
    for index, parts in enumerate(separate):
        for is_buffer, nbytes in parts:
            moves = is_buffer and not assignment.stream_buffers and index not in assignment.computed_below
            device = assignment.execution[index] if moves else assignment.storage[index]
            yield device, BUFFERS if is_buffer else WEIGHTS, nbytes


def stored_tensors(profile: Profile, assignment: Assignment) -> Iterator[tuple[Key, str, int]]:
    """Yield device, purpose and bytes of every parameter and buffer, each storage once per device."""
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
                own = spec.packed if spec.packed is not None and assignment.packed(index) else own
                taken = block_bytes(own) if device in assignment.caching else own
                yield device, BUFFERS if is_buffer else WEIGHTS, taken


def assemble(
    profile: Profile,
    assignment: Assignment,
    budgets: Mapping[Key, int],
    strategy: str,
    prediction: Prediction | None = None,
    reasons: Mapping[int, str] | None = None,
    pinned_memory: int | None = None,
    resident_limit: int | None = None,
    guarded: bool = False,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Return the plan of an assignment.

    Args:
        profile: the model.
        assignment: storage and execution device of its units.
        budgets: bytes by device key.
        strategy: name of the strategy that found the assignment.
        prediction: its predicted time.
        reasons: reasons for the place of units, by position, if more is known than `reason` finds.
        pinned_memory: bytes of host memory that may be pinned; None: a share of this host's.
        resident_limit: upper bound of the process's resident set; None: free memory.
        guarded: nothing is known of its activations.
        notes: more for the user.
    """
    uses = with_workspace_apart(device_uses(profile, assignment), profile, assignment)
    for key, gathered in _kv_gather(profile, assignment).items():
        uses[key] = replace(uses[key], kv_gather=gathered)
    fetched = kv_slots(profile, assignment.execution) if profile.kv_on_host else {}
    for key, sizes in fetched.items():
        taken = map(block_bytes, sizes) if key in assignment.caching else sizes
        uses[key] = replace(uses[key], kv_slots=sum(taken))
    for key, memory in assignment.caching.items():
        if key in uses:
            uses[key] = replace(uses[key], context=memory.context)
    may_pin = default_pinned_memory() if pinned_memory is None else pinned_memory
    return Plan(
        model=profile.name,
        strategy=strategy,
        main_device=assignment.main,
        devices=with_budgets(uses, budgets),
        parts=parts_of(profile, assignment, reasons),
        slots=assignment.slots,
        slot_bytes=assignment.slot_bytes,
        kv_slots=KV_SLOTS if fetched else 0,
        kv_in_ram=profile.kv_in_ram if fetched else 0,
        offload_dtype=profile.offload_dtype,
        host_kernels=PACKED if profile.packing else EXACT,
        offload_buffers=assignment.stream_buffers,
        expert_cache=passing_usage(profile.units, assignment).expert_cache,
        expert_split=assignment.expert_split,
        expert_reuse=profile.expert_reuse,
        staging_bytes=assignment.staging_bytes,
        readers=assignment.readers,
        pinned_memory=may_pin,
        upload_bytes=loading_bytes(stored_tensors(profile, assignment), uses, budgets, may_pin),
        gradient_bytes=GRADIENT_BYTES if may_pin >= GRADIENT_BYTES else 0,
        resident_limit=resident_limit,
        batch_size=profile.workload.batch_size,
        context_length=profile.workload.context_length,
        new_tokens=profile.workload.new_tokens,
        padded=profile.workload.padded,
        prefill_chunk_size=profile.prefill_chunk_size,
        dtype=profile.dtype,
        prediction=prediction,
        guarded=guarded,
        inputs=profile.inputs,
        notes=(*notes, *_notes(profile, guarded)),
    )


def loading_bytes(
    tensors: Iterable[tuple[Key, str, int]], uses: Mapping[Key, DevicePlan], budgets: Mapping[Key, int], may_pin: int
) -> int:
    """Return the bytes of pinned memory through which each accelerator gets its weights while they are loaded.

    Args:
        tensors: device, purpose and bytes of each stored tensor.
        uses: planned bytes of each device.
        budgets: bytes by device key. While weights are loaded the host holds its own, and nothing that runs.
        may_pin: bytes that may be pinned.
    """
    loaded: dict[Key, list[int]] = {}
    for device, _, nbytes in tensors:
        if is_accelerator(device) and nbytes:
            loaded.setdefault(device, []).append(nbytes)
    if not loaded:
        return 0
    host = uses.get(HOST)
    held = 0 if host is None else host.weights + host.buffers
    budget = budgets.get(HOST)
    return upload_bytes(loaded, min(may_pin, max(budget - held, 0)) if budget else may_pin)


def default_pinned_memory() -> int:
    """Return the bytes of host memory that may be pinned by default: a share of this host's."""
    return int(PINNED_SHARE * total_host_bytes())


def with_budgets(uses: Mapping[Key, DevicePlan], budgets: Mapping[Key, int]) -> dict[Key, DevicePlan]:
    """Return the uses with their budgets, also for devices that are not used.

    A host with a budget of 0 holds no weights. What passes through it from the disk is counted, and not limited.
    """
    keys = [*budgets, *(key for key in uses if key not in budgets)]
    given = {key: uses.get(key, DevicePlan(key, None)) for key in keys}
    limits = dict(budgets)
    if not budgets.get(HOST) and HOST in given and given[HOST].total:
        limits.pop(HOST, None)
    return {key: replace(use, budget=limits.get(key)) for key, use in given.items()}


def parts_of(profile: Profile, assignment: Assignment, reasons: Mapping[int, str] | None = None) -> tuple[Part, ...]:
    """Return the units of a profile as they are assigned; `reasons` as for `assemble`."""
    fetched = set(fetched_kv(profile, assignment.execution)) if profile.kv_on_host else set()
    on_disk = kv_on_disk(profile, assignment.execution) if profile.kv_on_host else {}
    return tuple(
        Part(
            name=unit.name,
            device=assignment.storage[index],
            runs_on=assignment.execution[index],
            bytes=unit.nbytes,
            reason=(reasons or {}).get(index) or reason(assignment, index, profile),
            kind=unit.class_name,
            computed_below=assignment.computed_below.get(index, 0),
            returns=None if profile.returning is None else index in profile.returning,
            kv_on_host=index in fetched,
            kv_on_disk=on_disk.get(index, 0),
        )
        for index, unit in enumerate(profile.units)
        if unit.tensors
    )


def reason(assignment: Assignment, index: int, profile: Profile) -> str:
    """Return the reason for the place of unit `index`, as far as the place itself shows it."""
    storage, execution = assignment.storage[index], assignment.execution[index]
    if is_accelerator(storage):
        if profile.units[index].is_tensor:
            return "held by a split module itself, so resident on the main device"
        return "resident: it fits"
    place, source = ("in RAM", "RAM") if storage == HOST else ("on disk", "disk")
    if index in assignment.computed_below:
        return "does not fit beside the rest: streamed from RAM for a prompt, computed on the CPU in steps"
    if is_accelerator(execution):
        if assignment.expert_split is not None and storage == HOST and profile.units[index].experts:
            return "does not fit beside the rest: streamed from RAM, where the CPU computes some experts in steps"
        turns = ", in turns over several links" if assignment.is_spread else ""
        return f"does not fit beside the rest: streamed from {source}{turns}"
    if not is_accelerator(assignment.main):
        return "runs on the CPU" if storage == HOST else "runs on the CPU, viewed in the checkpoint: RAM is full"
    if profile.units[index].is_lookup:
        return f"looked up {place}: a few rows cross the link, not the table"
    return f"computed on the CPU, where it lies {place}"


GUARDED = "nothing is resident that can be streamed, until the first forward has measured them"


def _notes(profile: Profile, guarded: bool) -> tuple[str, ...]:
    stored: tuple[str, ...] = (
        (f"weights are stored as {profile.stored_as}, and restored where they run",) if profile.stored_as else ()
    )
    stored += (profile.packing,) if profile.packing else ()
    if not profile.unknown:
        return stored
    return (*stored, profile.unknown, GUARDED) if guarded else (*stored, profile.unknown)
