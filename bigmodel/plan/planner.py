"""No garbage collection meanwhile: planning makes many small objects, and none of them is garbage until it is done.

`plan`: where every part of a model should be for it to run fastest, and how fast that is.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from ..arguments import check_choice, check_flags, shown, whole_number
from ..devices import DeviceLike, accelerators
from ..errors import PlanError
from ..profile import DtypeLike, Profile, profile_model, profile_source
from ..profile.machine.machine import MachineProfile
from ..profile.machine.nominal import nominal_machine
from ..profile.machine.probe import machine as machine_here
from ..profile.model.quantized import check_offload_dtype
from .memory.assemble import assemble
from .memory.slots import DEFAULT_SLOTS
from .result.budgets import Key, device_type_of, is_accelerator, read_budgets, with_headroom
from .result.plan import Plan
from .search.capacity import Room
from .search.fit import checked_main, greedy_assignment, room_around
from .search.searcher import OFFLOADS, Searcher
from .time.cost import CostModel
from .time.objective import Objective
from .time.unit_cost import device_name


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python's collector from looking through all objects of the process again and again in this context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


NOT_HERE = (
    "this machine lacks an accelerator of the budgets, so no time is predicted; parts are where round figures say"
)

OBJECTIVES = ("latency", "throughput", "fit")


@uncollected()
def plan(
    model: nn.Module | Profile | str | os.PathLike[str],
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    batch_size: int = 1,
    context_length: int | None = None,
    new_tokens: int | None = None,
    objective: str = "latency",
    dtype: DtypeLike | None = None,
    offload: str = "stream",
    main_device: DeviceLike | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    offload_buffers: bool = False,
    offload_dtype: str | None = None,
    slots: int = DEFAULT_SLOTS,
    machine: MachineProfile | None = None,
    per_pass: bool = True,
) -> Plan:
    """Return the plan under the budgets that takes least time, with its predicted seconds.

    Args:
        model: any module, also on meta, its profile, or a folder or Hub id whose config and headers alone are read.
        max_memory: budgets as `get_max_memory` takes them; None: what is free. `"disk"` is unlimited unless given.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end; None: a default.
        new_tokens: how many of these are generated; None: any share, the prompt may fill the context.
        objective: "latency": least seconds per generated token; "throughput": least seconds for the whole job, prompt
            and new tokens; "fit": greedy, as `make_plan`, no search.
        dtype: what floating point parameters will be cast to when loaded; None: as they are.
        offload: what happens to parts that do not fit the accelerators: "stream" them when their turn comes, "compute"
            them on the CPU, or "auto": whichever is faster for each, also one for prompts and the other for steps.
        main_device: where inputs are and streamed parts run; None: the first accelerator with room for any.
        no_split_module_classes: class names not to be split; None: find them.
        offload_buffers: buffers of a streamed part are streamed too.
        offload_dtype: what streamed weights are quantised to on their way: `"int8"`, `"int4"`; None: not at all.
        slots: how many streamed parts may be on the main device at once.
        machine: what it is planned for; None: this one, which is measured the first time (that takes half a minute).
        per_pass: with "auto", a part may be streamed for prompts and computed in steps. Its KV cache moves between the
            two, so that it must be one of `transformers`; False for callers that keep keys and values themselves.

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
        PlanError: an argument makes no sense; the message names it.
        SizeError: a budget is not a size.
        DeviceError: a budget's or the main device is none.
        CheckpointError: there is no such model.
    """
    check_choice("objective", objective, OBJECTIVES)
    check_choice("offload", offload, OFFLOADS)
    check_flags(offload_buffers=offload_buffers, per_pass=per_pass)
    slots = whole_number("slots", slots, least=1)
    if machine is not None and not isinstance(machine, MachineProfile):
        raise PlanError(f"machine is {shown(machine)}; give a profile as `bigmodel probe` measures it, or None")
    budgets = read_budgets(max_memory)
    shapes = {"batch_size": batch_size, "context_length": context_length, "new_tokens": new_tokens}
    profile = _profile(model, dtype, no_split_module_classes, device_type_of(budgets), shapes)
    offload_dtype = profile.offload_dtype if offload_dtype is None else offload_dtype
    profile = replace(profile, offload_dtype=check_offload_dtype(offload_dtype))
    if max_memory is None:
        budgets = with_headroom(budgets)
    room = Room(budgets, profile.activations, slots, checked_main(main_device, budgets), offload != "stream")
    assignment = greedy_assignment(profile, room, "auto", offload_buffers, offload != "compute")
    room = room_around(assignment, room)
    if not profile.phases:
        return assemble(profile, assignment, budgets, objective)
    measured = machine or _machine_for(budgets)
    cost = CostModel(profile, measured or nominal_machine())
    goal = Objective(cost, objective)
    searcher = Searcher(profile, goal, offload, offload_buffers)
    if objective != "fit":
        assignment = searcher.best(room, assignment)
    if objective != "fit" and offload == "auto" and per_pass:
        assignment = searcher.best_per_pass(room, assignment)
    if measured is None:
        return replace(assemble(profile, assignment, budgets, objective), notes=(NOT_HERE,))
    return assemble(profile, assignment, budgets, objective, searcher.predict(room, assignment))


def _machine_for(budgets: Mapping[Key, int]) -> MachineProfile | None:
    """Return the profile of this machine; None if the budgets name an accelerator that it does not have."""
    present = set(accelerators())
    names = [device_name(key) for key, size in budgets.items() if size > 0 and is_accelerator(key)]
    return machine_here() if present.issuperset(names) else None


def _profile(
    model: nn.Module | Profile | str | os.PathLike[str],
    dtype: DtypeLike | None,
    no_split_module_classes: Iterable[str] | str | None,
    device_type: str,
    shapes: Mapping[str, int | None],
) -> Profile:
    if isinstance(model, Profile):
        return model
    if isinstance(model, (str, os.PathLike)):
        return profile_source(
            model,
            dtype="auto" if dtype is None else dtype,
            no_split_module_classes=no_split_module_classes,
            device_type=device_type,
            **shapes,  # type: ignore[arg-type]
        )
    return profile_model(
        model,
        dtype=dtype,
        no_split_module_classes=no_split_module_classes,
        device_type=device_type,
        **shapes,  # type: ignore[arg-type]
    )
