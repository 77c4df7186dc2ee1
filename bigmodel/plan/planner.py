"""`plan`: storage and execution device of every part of a model under budgets, with predicted memory and time.

From top to bottom: `plan`, which reads its arguments; `_Shapes`, which chooses slots and chunks of prompts for a batch
size; `_Request`, which plans one profile: greedily, and by a search where one is of use; checks of arguments.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from torch import nn

from ..arguments import check_choice, check_flags, share, shown, whole_number
from ..devices import (
    HOST,
    DeviceLike,
    accelerators,
    format_size,
    parse_size,
)
from ..devices.cgroup import usable_cores
from ..devices.memory import CachingMemory
from ..errors import BudgetError, PlanError
from ..limits import DEFAULT_SLOTS, MOST_READERS, READERS
from ..profile import DtypeLike, Profile, profile_model, profile_source
from ..profile.machine.machine import MachineProfile, nominal_machine
from ..profile.machine.probe import known_machine
from ..profile.machine.probe import machine as measured_machine
from ..profile.model.quantized import OFFLOAD_DTYPES, refuse_twice
from ..profile.trace.dry_run import SampleInputs
from ..quantized.host_kernels import EXACT, HOST_KERNELS, PACKED
from .memory.assignment import STEP, Assignment, assemble
from .result.budgets import (
    Key,
    caching_memories,
    checked_main,
    device_name,
    device_type_of,
    is_accelerator,
    read_budgets,
    with_headroom,
    within_devices,
    without_accelerators,
)
from .result.draft import with_draft, without_draft
from .result.plan import Plan
from .result.stages import stage_runs
from .search.batch import best_batch
from .search.chunks import with_chunks
from .search.fewer_slots import with_slots
from .search.filling import greedy_assignment, least_resident
from .search.items import Capacity
from .search.searcher import OFFLOADS, Searcher, capacity_around
from .search.split_blocks import with_split_blocks
from .time.cost import CostModel, Objective

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Strategies of filling devices. "auto" searches; the others fill accelerators in order, evenly or to their budgets."""

OBJECTIVES = ("latency", "throughput", "fit")
"""Quantities that the search minimises. "fit" does not search: the greedy placement is kept."""

PROFILES = 8
"""Profiles that one call keeps at most: it may plan the same shapes with several numbers of slots."""

ANOTHER_MACHINE = (
    "this machine lacks an accelerator of the budgets, so no time is predicted; the search used nominal speeds"
)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collector: planning creates many small objects that live until it is done."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_garbage_collection()
def plan(
    model: nn.Module | Profile | str | os.PathLike[str],
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    strategy: str = "auto",
    batch_size: int | None = None,
    context_length: int | None = None,
    dtype: DtypeLike | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    main_device: DeviceLike | None = None,
    new_tokens: int | None = None,
    offload_buffers: bool = False,
    offload_dtype: str | None = None,
    host_kernels: str | None = None,
    slots: int = DEFAULT_SLOTS,
    expert_cache: int | str | None = None,
    expert_reuse: float | None = None,
    pinned_memory: int | str | None = None,
    objective: str | None = None,
    offload: str = "stream",
    machine: MachineProfile | None = None,
    per_pass: bool = True,
    sample_inputs: SampleInputs | None = None,
    strict: bool = False,
    padded: bool = True,
    revision: str | None = None,
    draft_tokens: int = 0,
    draft: Plan | None = None,
    prefill_chunk_size: int | str | None = None,
    micro_batch_size: int | str | None = None,
) -> Plan:
    """Return a plan under which no device passes its budget. `bigmodel.make_plan` is this function.

    A part held on an accelerator is resident and runs there. A part held in RAM ("cpu") or viewed in the memory-mapped
    checkpoint ("disk") is streamed to an accelerator through slots when its turn comes; embeddings are looked up where
    they are held; without accelerators everything runs on the CPU. With the strategy "auto", the search chooses what is
    streamed: streamed parts are spread between resident ones, which compute while the next one is fetched. It also
    chooses where that runs: on the main device, or on several accelerators in turns, whose links then fetch at once.

    With an `objective` or a `machine` the plan also predicts seconds. Without either nothing is measured and no time
    is predicted: a model that fits is placed in order, and the search for one that does not uses the speeds of this
    machine if `bigmodel probe` has measured them, nominal ones otherwise.

    Where nothing is known of a model's activations, every part that can be is streamed through one slot: the plan is
    `Plan.guarded`, and the first forward of the dispatched model measures what a better one is then made with.

    Args:
        model: any module, also on meta; its profile (which then fixes shapes, dtype and classes); or a folder or Hub
            id, of which the config and the headers are read.
        max_memory: budgets as `get_max_memory` takes them; None: what is free. `"disk"` is unlimited unless given. A
            host with 0 holds no weights; what passes through it from the disk is counted, and not limited. A GPU's is
            of the bytes that its allocator reserves, of which tensors take a part (`DevicePlan.unused` is the rest); of
            the device's own context only what passes the budget is kept free (`DevicePlan.context`).
        strategy: one of `STRATEGIES`.
        batch_size: sequences at once. None: 1, or, with the objective "throughput", the number that generates the most
            tokens per second within the budgets, up to `MOST_SEQUENCES` (see `plan.search.batch`).
        context_length: tokens of a sequence at its end; None: a default; 0: no KV cache and no activations.
        dtype: what floating point parameters will be cast to when loaded; None: as they are.
        no_split_module_classes: class names not to be split; None: find them. Then blocks are split where one
            accelerator can run them only so, or is predicted to be faster so, as slots for whole ones take much of its
            memory (see `plan.search.split_blocks`); not where experts are fetched one by one.
        main_device: device of the inputs, on which all streamed parts run then; None: the inputs are on the first
            accelerator on which a part fits, and streamed parts on as many as make a pass faster.
        new_tokens: number of the context's tokens that are generated; None: any number, so the prompt may fill it.
        offload_buffers: buffers of a streamed part are streamed, too, and not kept where it runs.
        offload_dtype: dtype that streamed weights are quantised to on the link, `"int8"` or `"int4"`; None: none.
        host_kernels: "packed": the host computes with quantised weights that RAM holds as they are packed, where it has
            kernels for them (int4, int8); outputs are then those kernels'. "exact", or None: it restores them bit for
            bit. A profile has its own.
        slots: maximum number of streamed parts on an accelerator at once. With `offload="stream"` there are fewer where
            so many would leave all accelerators idle.
        expert_cache: bytes of each device (a number, or text such as "4GiB") for experts that are fetched one by one;
            None: as many as streaming whole layers of them would take, or fewer where nothing else lets an accelerator
            be used.
        expert_reuse: share of the experts chosen by a step that are cached because routers choose what they have chosen
            before, beyond those that are by chance: `dispatch_stats()["experts"]` of a mixture that has run has it as
            `reuse`. Times and the division of experts follow from it. None: a profile's, or 0: routers have no habits.
        pinned_memory: bytes of host memory that may be pinned for a GPU to copy from; None: half of this host's.
        objective: quantity to minimise: "latency": seconds per generated token; "throughput": seconds of prompt and new
            tokens together; "fit": none, the greedy placement is kept; None: "latency", without a prediction unless
            `machine` is given.
        offload: how parts that do not fit the accelerators are run: "stream" streams them when their turn comes,
            "compute" computes them on the CPU, "auto" chooses the faster way for each.
        machine: the machine to plan for; None: this one. With an objective it is measured the first time (half a
            minute).
        per_pass: with "auto" and a prediction, a part may be streamed for prompts and computed in steps. Its KV cache
            moves between the two, so the cache must be one of `transformers`; False for a caller that keeps its own, as
            the server does: its attention gathers the keys and values of a layer, which is counted.
        sample_inputs: arguments of forward for a model whose inputs follow no known convention, as `profile_model`
            takes them; they fix batch size and shapes.
        strict: raise PlanError if the memory of any input of the model is unknown, instead of noting it.
        padded: budgets hold for padded sequences, too, also for a single one: a mask that leaves tokens out takes up to
            a few times the square of the context in bytes. False: no sequence is ever padded, which saves that.
        revision: branch, tag or commit of a Hub id.
        draft_tokens: tokens that something else proposes for each sequence of a step, at most, such as a draft model.
            `Plan.speculation` then has the predicted seconds of passes that verify them, of this machine if `bigmodel
            probe` has measured it, and of a nominal one otherwise; a note says whether proposals pay. 0: none.
        draft: plan of what proposes them within the same budgets, such as an MTP head's: what it takes is kept free,
            and counted as `DevicePlan.draft` and in the KV cache; its passes are those of a proposal.
        prefill_chunk_size: tokens of each forward in which `generate` runs a longer prompt: the activations of a chunk
            are planned, not those of the whole prompt, and streamed weights are fetched for each chunk. "auto":
            whole prompts if accelerators run all layers then, else the largest of `PREFILL_CHUNKS` with which they run
            the most. None: a prompt is one forward.
        micro_batch_size: where all parts are resident on several accelerators, rows in which a forward of the batch is
            computed, several such micro-batches at once: see `Plan.micro_batch_size`. What those in flight take is
            planned, for inputs of the planned shape whose outputs are of all tokens. "auto": the rows with which the
            batch is predicted to be fastest, by this machine's speeds if `bigmodel probe` has measured them; none, if
            that is about as fast whole. None: a forward is computed whole.

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
        PlanError: an argument is invalid, or two contradict each other; the message names them.
        SizeError: a budget is not a size.
        DeviceError: a budget's device or the main device does not exist.
        CheckpointError: `model` is a folder or id that holds no model.
    """
    _check_choices(strategy, objective, offload, machine)
    check_choice("host_kernels", host_kernels, (*HOST_KERNELS, None))
    check_flags(offload_buffers=offload_buffers, per_pass=per_pass, strict=strict)
    slots = whole_number("slots", slots, least=1)
    budgets = read_budgets(max_memory)
    caching = caching_memories(budgets, machine)
    budgets, lowered = within_devices(budgets, caching)
    if max_memory is None:
        budgets = with_headroom(budgets)
    request = _Request(
        budgets if draft is None else without_draft(budgets, draft),
        caching,
        strategy,
        objective,
        offload,
        offload_buffers,
        offload_dtype,
        slots,
        checked_main(main_device, budgets),
        None if expert_cache is None else parse_size(expert_cache),
        None if pinned_memory is None else parse_size(pinned_memory),
        expert_reuse=None if expert_reuse is None else share("expert_reuse", expert_reuse),
        resident_limit=None if max_memory is None else budgets.get(HOST),
        machine=machine,
        per_pass=per_pass,
        strict=strict,
        notes=lowered,
        draft_tokens=whole_number("draft_tokens", draft_tokens, least=0),
    )
    if isinstance(prefill_chunk_size, str):
        check_choice("prefill_chunk_size", prefill_chunk_size, ("auto", None))
    are_rows_fixed = isinstance(model, Profile) or sample_inputs is not None
    micro_batch_size = _checked_micro_batch_size(micro_batch_size, are_rows_fixed or draft is not None)

    @lru_cache(maxsize=PROFILES)
    def profile_of(batch_size: int, split_blocks: bool, **shape: Any) -> Profile:
        return _profile(
            model,
            dtype=dtype,
            no_split_module_classes=no_split_module_classes,
            split_blocks=split_blocks,
            device_type=device_type_of(budgets),
            batch_size=batch_size,
            context_length=context_length,
            new_tokens=new_tokens,
            sample_inputs=sample_inputs,
            host_kernels=host_kernels,
            padded=padded,
            revision=revision,
            **shape,
        )

    may_split = no_split_module_classes is None and not isinstance(model, Profile) and request.may_split_blocks
    shapes = _Shapes(request, profile_of, budgets, draft, prefill_chunk_size, micro_batch_size, may_split)
    if batch_size is None and objective == "throughput" and not are_rows_fixed:
        return best_batch(shapes.plan)
    return shapes.plan(1 if batch_size is None else batch_size)


make_plan = plan
"""The same function under the name it has at the top level, where `bigmodel.plan` is this package."""


@dataclass(frozen=True)
class _Shapes:
    """The shapes at which a model may be planned: a batch size is given, slots and chunks of prompts may be chosen.

    Attributes:
        request: the arguments that do not depend on shapes.
        profile_of: returns the profile at a batch size, of whole or split blocks, and at further shapes by name.
        budgets: those that the model shares with `draft`.
        draft: as for `plan`.
        prefill_chunk_size: as for `plan`.
        micro_batch_size: as for `plan`.
        may_split: blocks may be split, as `profile_model` does it.
    """

    request: _Request
    profile_of: Callable[..., Profile]
    budgets: Mapping[Key, int]
    draft: Plan | None
    prefill_chunk_size: int | str | None
    micro_batch_size: int | str | None
    may_split: bool

    def plan(self, batch_size: int) -> Plan:
        """Return the plan of a batch size."""
        if not (self.request.accelerators and self.request.offload == "stream"):
            return self._plan_with_slots(batch_size, False, self.request.slots)

        def plan_of(split_blocks: bool) -> Plan:
            return with_slots(partial(self._plan_with_slots, batch_size, split_blocks), self.request.slots)

        if not self.may_split:
            return plan_of(False)
        return with_split_blocks(plan_of, self.request.objective)

    def _plan_with_slots(self, batch_size: int, split_blocks: bool, slots: int) -> Plan:
        request = replace(self.request, slots=slots)
        plan_of = partial(self._plan_in_chunks, request, batch_size, split_blocks)
        if isinstance(self.prefill_chunk_size, str):
            return with_chunks(plan_of, bool(request.accelerators))
        return plan_of(self.prefill_chunk_size)

    def _plan_in_chunks(self, request: _Request, batch_size: int, split_blocks: bool, chunk: int | None) -> Plan:
        profile = self.profile_of(batch_size, split_blocks, prefill_chunk_size=chunk)
        if self.micro_batch_size is not None:
            from .search.micro_batches import with_micro_batches

            forward_of = partial(self.profile_of, split_blocks=split_blocks, all_logits=True)
            return with_micro_batches(request.plan, profile, self.micro_batch_size, forward_of, request.speeds)
        if self.draft is None:
            return request.plan(profile)
        both = with_draft(request.plan(profile), self.draft, self.budgets)
        if both is None:  # its temporary tensors are larger than the model's
            apart = replace(request, budgets=without_draft(self.budgets, self.draft, apart=True))
            both = with_draft(apart.plan(profile), self.draft, self.budgets)
        assert both is not None
        return both


@dataclass(frozen=True)
class _Request:
    """Arguments of `plan` beside the model and its workload, validated; it plans one profile with them.

    Attributes:
        caching: devices whose allocators cache.
        resident_limit: as `Plan.resident_limit`.
        notes: notes for every plan.
        draft_tokens: most tokens proposed for each sequence of a step.
    """

    budgets: Mapping[Key, int]
    caching: Mapping[Key, CachingMemory]
    strategy: str
    objective: str | None
    offload: str
    offload_buffers: bool
    offload_dtype: str | None
    slots: int
    main_device: Key | None
    expert_cache: int | None
    pinned_memory: int | None
    resident_limit: int | None
    machine: MachineProfile | None
    per_pass: bool
    strict: bool
    notes: tuple[str, ...]
    draft_tokens: int = 0
    expert_reuse: float | None = None

    @property
    def is_predicted(self) -> bool:
        """Whether seconds are asked for."""
        return self.objective is not None or self.machine is not None

    @cached_property
    def accelerators(self) -> dict[Key, int]:
        """Budgets of the accelerators that have one."""
        return {key: size for key, size in self.budgets.items() if is_accelerator(key) and size > 0}

    @property
    def may_split_blocks(self) -> bool:
        """Whether other arguments leave it open that blocks are split: their keys and values stay on one device."""
        searches = self.strategy == "auto" and self.objective != "fit"
        return searches and self.per_pass and len(self.accelerators) == 1

    def known_speeds(self) -> MachineProfile | None:
        """Return the measured speeds of the machine to plan for; if seconds are asked for, this one is measured now.

        Returns:
            None if this machine lacks an accelerator of the budgets, or was not measured and is not asked to be.
        """
        return self.machine or (_this_machine(self.budgets) if self.is_predicted else known_machine())

    def speeds(self) -> MachineProfile:
        """Return the measured speeds, else nominal ones."""
        return self.known_speeds() or nominal_machine()

    def plan(self, profile: Profile) -> Plan:
        """Return the plan of a profile; it says if it leaves all accelerators idle."""
        made = self._plan(profile if self.per_pass else replace(profile, gathers_kv=True))
        return replace(made, notes=(*made.notes, *self._idle(made)))

    def _idle(self, made: Plan) -> tuple[str, ...]:
        if not self.accelerators or any(map(is_accelerator, made.execution.values())):
            return ()
        names = ", ".join(f"{device_name(key)} ({format_size(size)})" for key, size in self.accelerators.items())
        sooner = "" if self.offload == "stream" else ", or none runs sooner there"
        return (f"the CPU runs everything: no part fits on {names} beside what a forward takes there{sooner}",)

    def _plan(self, profile: Profile) -> Plan:
        if self.strict and profile.unknown:
            raise PlanError(f"{profile.name}: {profile.unknown}")
        profile = self._with_link_dtype(profile)
        if self.expert_reuse is not None:
            profile = replace(profile, expert_reuse=self.expert_reuse)
        try:
            made = self._of_profile(profile)
        except BudgetError:
            other = self._with_kv_moved(profile, may_use_disk=True)
            if other is None:
                raise
            return other
        if not self._computes_kv_on_host(profile, made):
            return made
        from .search.host_kv import is_worthwhile

        other = self._with_kv_moved(profile, may_use_disk=False)
        return other if other is not None and is_worthwhile(other, made, self.objective) else made

    def _computes_kv_on_host(self, profile: Profile, made: Plan) -> bool:
        """Whether a plan has the host compute units whose keys and values could lie there alone."""
        names = {profile.units[index].name for index in profile.growing}
        return bool(self.accelerators) and any(part.runs_on == HOST and part.name in names for part in made.parts)

    def _with_kv_moved(self, profile: Profile, may_use_disk: bool) -> Plan | None:
        """Return the plan with keys and values on the host whose units accelerators run, or with the older ones on
        disk; None if they may not be moved, if it is of no use, or if that does not fit either."""
        of_draft = self.draft_tokens and not self.per_pass  # an engine's: its keys and values are beside the model's
        if of_draft or self.offload == "compute" or self.strategy != "auto":
            return None
        from .search.host_kv import plan_with_kv_on_disk, plan_with_kv_on_host

        plan_of, runs = replace(self, offload="stream")._of_profile, self._runs_on_accelerators
        found = plan_with_kv_on_host(profile, self.budgets, runs, plan_of)
        return plan_with_kv_on_disk(profile, self.budgets, runs, plan_of) if found is None and may_use_disk else found

    def _runs_on_accelerators(self, budgets: Mapping[Key, int], profile: Profile, units: Sequence[int]) -> bool:
        """Whether accelerators run all of `units` within the budgets."""
        request = replace(self, budgets=budgets)
        try:
            _, found = request._greedy(profile, request._capacity(profile))
        except BudgetError:
            return False
        return all(is_accelerator(found.execution[index]) for index in units)

    def _of_profile(self, profile: Profile) -> Plan:
        minimised = self.objective or "latency"
        assembled = partial(
            self._assembled,
            profile,
            budgets=self.budgets,
            strategy=minimised if self.is_predicted and self.strategy == "auto" else self.strategy,
            pinned_memory=self.pinned_memory,
            resident_limit=self.resident_limit,
            notes=self.notes,
        )
        capacity = self._capacity(profile)
        if profile.unknown and not profile.phases:
            cautious = least_resident(profile, capacity, self.offload_buffers)
            if cautious is not None:
                return replace(assembled(cautious, guarded=True), strategy=self.strategy)
            capacity = replace(capacity, budgets=without_accelerators(self.budgets))
        streaming = self._streaming_experts(profile, capacity)
        capacity, assignment = self._greedy(profile, capacity)
        streams = any(map(assignment.streamed, range(len(profile.units))))
        searched = self.strategy == "auto" and minimised != "fit" and (self.is_predicted or streams)
        divided = self.strategy == "auto" and minimised != "fit" and self._may_have_stages(profile, assignment)
        if not profile.phases or not (searched or self.is_predicted or divided):
            return assembled(assignment)
        capacity = capacity_around(assignment, capacity)
        known = self.known_speeds()
        goal = Objective(CostModel(profile, known or nominal_machine()), minimised)
        searcher = Searcher(profile, goal, self.offload, self.offload_buffers)
        if searched:
            capacity, assignment = searcher.best_of_all(
                capacity,
                assignment,
                streaming,
                may_spread=self.main_device is None,
                may_change=self.is_predicted and self.per_pass and self.offload == "auto",
                may_split=self.is_predicted,
            )
        if divided or (searched and self._may_have_stages(profile, assignment)):
            from .search.stages import StageSearch

            assignment = StageSearch(profile, goal, self.offload_buffers).best(capacity, assignment)
        if not self.is_predicted:
            return assembled(assignment)
        if known is None:
            made = assembled(assignment)
            return replace(made, notes=(*made.notes, ANOTHER_MACHINE))
        return assembled(assignment, prediction=searcher.predict(capacity, assignment))

    def _may_have_stages(self, profile: Profile, assignment: Assignment) -> bool:
        """Whether an assignment is resident on several accelerators, or could be where that is of use: of a model that
        generates, or whose forward is computed in micro-batches."""
        used = len(set(assignment.execution))
        several = used > 1 or (self.objective == "throughput" and len(self.accelerators) > 1)
        passes = profile.micro_batch is not None or (bool(profile.phases) and profile.phases[-1].name == STEP)
        return (
            several
            and passes
            and all(
                is_accelerator(key) or unit.is_lookup
                for unit, key in zip(profile.units, assignment.storage, strict=True)
            )
        )

    def _assembled(self, profile: Profile, assignment: Assignment, **known: Any) -> Plan:
        """Return the plan of an assignment, with the seconds of passes that verify proposed tokens if any are, and of
        stages if it has several."""
        made = assemble(profile, assignment, **known)
        in_stages = len(set(assignment.execution)) > 1 and bool(stage_runs(made))
        if not (self.draft_tokens or in_stages):
            return made
        from .time.speculation import predict_speculation
        from .time.stages import predict_stages

        cost = CostModel(profile, self.speeds())
        return replace(
            made,
            speculation=predict_speculation(cost, assignment, self.draft_tokens),
            stages=predict_stages(cost, assignment) if in_stages else None,
        )

    def _greedy(self, profile: Profile, capacity: Capacity) -> tuple[Capacity, Assignment]:
        """Return the greedy assignment, and the capacity that it keeps to: that given, but for a cache of experts of no
        given size, which may be smaller."""

        def greedy(capacity: Capacity) -> Assignment:
            return greedy_assignment(profile, capacity, self.strategy, self.offload_buffers, self.offload != "compute")

        if not any(unit.experts for unit in profile.units):
            return capacity, greedy(capacity)
        from .search.expert_cache import with_cache_that_fits

        return with_cache_that_fits(profile, capacity, greedy)

    def _streaming_experts(self, profile: Profile, capacity: Capacity) -> tuple[Capacity, Assignment] | None:
        """Return the greedy assignment of a mixture in which the host computes nothing, with its capacity; None if it
        does not run on an accelerator. Where the host may compute, the usual one does not look for a cache that fits.
        """
        if self.offload != "auto" or not capacity.host_compute or not any(unit.experts for unit in profile.units):
            return None
        found, assignment = self._greedy(profile, replace(capacity, host_compute=False))
        if not any(map(is_accelerator, assignment.execution)):
            return None
        return capacity_around(assignment, replace(found, host_compute=True)), assignment

    def _with_link_dtype(self, profile: Profile) -> Profile:
        offload_dtype = profile.offload_dtype if self.offload_dtype is None else self.offload_dtype
        if offload_dtype is None:
            return profile
        check_choice("offload_dtype", offload_dtype, (*OFFLOAD_DTYPES, None))
        refuse_twice(offload_dtype, profile.stored_as)
        return replace(profile, offload_dtype=offload_dtype)

    def _capacity(self, profile: Profile) -> Capacity:
        accelerated = any(map(is_accelerator, self.budgets))
        return Capacity(
            self.budgets,
            profile.activations if accelerated else profile.packed_activations,
            self.slots,
            self.main_device,
            host_compute=self.offload != "stream",
            expert_cache=self.expert_cache,
            readers=reader_count(self.machine or (known_machine() if self.is_predicted else None)),
            caching=self.caching,
        )


def _check_choices(strategy: str, objective: str | None, offload: str, machine: MachineProfile | None) -> None:
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("objective", objective, (None, *OBJECTIVES))
    check_choice("offload", offload, OFFLOADS)
    if machine is not None and not isinstance(machine, MachineProfile):
        raise PlanError(f"machine is {shown(machine)}; give a profile as `bigmodel probe` measures it, or None")
    if strategy != "auto" and objective not in (None, "fit"):
        raise PlanError(
            f"strategy={strategy!r} fills devices without a search, and objective={objective!r} needs one; "
            "give strategy='auto', or objective='fit' for a prediction alone"
        )


def _checked_micro_batch_size(size: int | str | None, are_rows_fixed: bool) -> int | str | None:
    if isinstance(size, str):
        check_choice("micro_batch_size", size, ("auto", None))
    elif size is not None:
        size = whole_number("micro_batch_size", size, least=1)
    if size is not None and are_rows_fixed:
        raise PlanError("micro_batch_size needs the model itself: a profile, sample_inputs and a draft fix the rows")
    return size


def _this_machine(budgets: Mapping[Key, int]) -> MachineProfile | None:
    """Return the profile of this machine; None if the budgets name an accelerator that it does not have."""
    present = set(accelerators())
    names = [device_name(key) for key, size in budgets.items() if size > 0 and is_accelerator(key)]
    return measured_machine() if present.issuperset(names) else None


def reader_count(machine: MachineProfile | None = None) -> int:
    """Return the number of threads that read from disk: as few as keep it busy.

    Args:
        machine: the machine to plan for, as it was measured; None: this one, one thread for two cores within bounds.
    """
    if machine is not None:
        return machine.readers or READERS
    return min(max(usable_cores() // 2, READERS), MOST_READERS)


def _profile(
    model: nn.Module | Profile | str | os.PathLike[str],
    dtype: DtypeLike | None,
    host_kernels: str | None,
    revision: str | None,
    **options: Any,
) -> Profile:
    """Return the profile of a module, or of the model in a folder or repository; a profile as it is."""
    if revision is not None and not isinstance(model, (str, os.PathLike)):
        raise PlanError(f"revision={revision!r} is of a repository on the Hub, and the model is given: remove it")
    if isinstance(model, Profile):
        if options["sample_inputs"] is not None:
            raise PlanError("a profile fixes the inputs: give sample_inputs to profile_model, or the model itself")
        if host_kernels is not None and (host_kernels == PACKED) != bool(model.packing):
            raise PlanError("a profile fixes what the host computes: give host_kernels to profile_model")
        return model
    options["host_kernels"] = host_kernels or EXACT
    if isinstance(model, (str, os.PathLike)):
        return profile_source(model, "auto" if dtype is None else dtype, revision, **options)
    return profile_model(model, dtype=dtype, **options)
