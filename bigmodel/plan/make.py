"""`make_plan`: from a model or its profile, budgets and a strategy's name to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from ..arguments import check_choice, check_flags, whole_number
from ..devices import DeviceLike
from ..profile import DtypeLike, Profile, profile_model
from ..profile.machine.nominal import nominal_machine
from ..profile.machine.probe import known_machine
from ..profile.model.quantized import check_offload_dtype
from .memory.assemble import assemble
from .memory.slots import DEFAULT_SLOTS
from .result.budgets import device_type_of, read_budgets, with_headroom
from .result.plan import Plan
from .search.capacity import Room
from .search.fit import checked_main, greedy_assignment, room_around
from .search.searcher import Searcher
from .time.cost import CostModel
from .time.objective import Objective

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names that may stand for a device map. "auto": the best this planner finds, by search where shapes are known."""


def make_plan(
    model: nn.Module | Profile,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    strategy: str = "auto",
    batch_size: int = 1,
    context_length: int | None = None,
    dtype: DtypeLike | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    main_device: DeviceLike | None = None,
    new_tokens: int | None = None,
    offload_buffers: bool = False,
    offload_dtype: str | None = None,
    slots: int = DEFAULT_SLOTS,
    host_compute: bool = False,
) -> Plan:
    """Return a plan under which no device passes its budget.

    What lies on an accelerator is resident and runs there. What lies in RAM ("cpu") or is viewed in the
    memory-mapped checkpoint ("disk") is streamed to the main device through slots when its turn comes; embeddings
    are looked up where they lie; without accelerators everything runs on the CPU. With "auto", what is streamed is
    chosen by search: so spread between resident parts that they compute while it arrives, as far as this machine was
    measured (`bigmodel probe`), by round figures otherwise.

    Args:
        model: any module, also on meta, or its profile (then shapes, dtype and classes are the profile's).
        max_memory: budgets as `get_max_memory` takes them; None: what is free. `"disk"` is unlimited unless given.
        strategy: one of `STRATEGIES`.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end; None: a default; 0: count no KV cache and no activations.
        dtype: what floating point parameters will be cast to when loaded; None: as they are.
        no_split_module_classes: class names not to be split; None: find them.
        main_device: where inputs are and streamed units run; None: the first accelerator with room for any.
        new_tokens: how many of the context's tokens are generated; None: any share, the prompt may fill the context.
        offload_buffers: buffers of a streamed unit are streamed too, and not kept where it runs.
        offload_dtype: what streamed weights are quantised to on their way: `"int8"`, `"int4"`; None: not at all.
        slots: how many streamed units may be on the main device at once.
        host_compute: units may run on the CPU although accelerators run others (`Plan.execution` says which).

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
        PlanError: an argument makes no sense; the message names it.
        SizeError: a budget is not a size.
        DeviceError: a budget's or the main device is none.
    """
    check_choice("strategy", strategy, STRATEGIES)
    check_flags(offload_buffers=offload_buffers, host_compute=host_compute)
    slots = whole_number("slots", slots, least=1)
    budgets = read_budgets(max_memory)
    if isinstance(model, Profile):
        profile = model
    else:
        profile = profile_model(
            model,
            batch_size=batch_size,
            context_length=context_length,
            new_tokens=new_tokens,
            dtype=dtype,
            no_split_module_classes=no_split_module_classes,
            device_type=device_type_of(budgets),
        )
    offload_dtype = profile.offload_dtype if offload_dtype is None else offload_dtype
    profile = replace(profile, offload_dtype=check_offload_dtype(offload_dtype))
    if max_memory is None:
        budgets = with_headroom(budgets)
    room = Room(budgets, profile.activations, slots, checked_main(main_device, budgets), host_compute)
    assignment = greedy_assignment(profile, room, strategy, offload_buffers)
    if strategy == "auto" and profile.phases and any(map(assignment.streamed, range(len(profile.units)))):
        cost = CostModel(profile, known_machine() or nominal_machine())
        searcher = Searcher(profile, Objective(cost), "auto" if host_compute else "stream", offload_buffers)
        assignment = searcher.best(room_around(assignment, room), assignment)
    return assemble(profile, assignment, budgets, strategy)
