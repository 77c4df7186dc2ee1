"""`make_plan`: from a model or its profile, budgets and a strategy's name to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ..devices import DeviceLike, device_key
from ..errors import PlanError
from ..profile import DtypeLike, Profile, profile_model
from ..profile.quantized import check_offload_dtype
from .assemble import assemble
from .balance import balanced_caps
from .budgets import Key, device_type_of, read_budgets, with_headroom
from .evaluate import Assignment, device_uses, over_budget
from .greedy import Item, Room, place_greedily
from .groups import tie_groups
from .items import assignment_of, item_of
from .plan_type import Plan
from .shortage import budget_error

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Names that may stand for a device map. "auto": the best this planner finds."""

ATTEMPTS = 4
"""How often the greedy placement is repeated with smaller budgets when its exact cost passes them."""

DEFAULT_SLOTS = 2
"""How many streamed units may be on the main device at once: one runs while the next one arrives."""


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
    are looked up where they lie; without accelerators everything runs on the CPU.

    Args:
        model: any module, also on meta, or its profile (then shapes, dtype and classes are the profile's).
        max_memory: budgets as `get_max_memory` takes them; None: what is free. `"disk"` is unlimited unless given.
        strategy: one of `STRATEGIES`.
        batch_size: sequences at once.
        context_length: tokens of a sequence at its end; None: a default; 0: count no KV cache and no activations.
        dtype: what floating point parameters will be cast to when loaded; None: as they are.
        no_split_module_classes: class names not to be split; None: find them.
        main_device: where inputs are and streamed units run; None: the first accelerator with a budget.
        new_tokens: how many of the context's tokens are generated; None: any share, the prompt may fill the context.
        offload_buffers: buffers of a streamed unit are streamed too, and not kept where it runs.
        offload_dtype: what streamed weights are quantised to on their way: `"int8"`, `"int4"`; None: not at all.
        slots: how many streamed units may be on the main device at once.
        host_compute: units may run on the CPU although accelerators run others (`Plan.execution` says which).

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
        PlanError: the strategy, a shape, or the main device makes no sense.
    """
    if strategy not in STRATEGIES:
        raise PlanError(f"strategy {strategy!r} is not known; use one of {', '.join(STRATEGIES)}")
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
    profile = replace(profile, offload_dtype=check_offload_dtype(offload_dtype or profile.offload_dtype))
    if max_memory is None:
        budgets = with_headroom(budgets)
    room = Room(budgets, profile.activations, slots, checked_main(main_device, budgets), host_compute)
    assignment = greedy_assignment(profile, room, strategy, offload_buffers)
    return assemble(profile, assignment, budgets, strategy)


def greedy_assignment(
    profile: Profile, room: Room, strategy: str, stream_buffers: bool, streams: bool = True
) -> Assignment:
    """Return the greedy placement of a profile, or one balanced over the accelerators.

    Args:
        profile: the model.
        room: the budgets.
        strategy: one of `STRATEGIES`.
        stream_buffers: buffers lie with the weights, and not where the unit runs.
        streams: False has the host compute all that is not resident.

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
    """
    groups = tie_groups(profile.units)
    items = [item_of(group, profile, stream_buffers, streams) for group in groups]

    def attempt(budgets: Mapping[Key, int]) -> Assignment | None:
        given = dict(budgets)
        for _ in range(ATTEMPTS):
            narrowed = replace(room, budgets=given)
            placement = place_greedily(items, replace(narrowed, budgets=_capped(items, narrowed, strategy)))
            if placement is None:
                return None
            assignment = assignment_of(profile, groups, placement, stream_buffers, room.main_device)
            over = over_budget(device_uses(profile, assignment), budgets)
            if not over:
                return assignment
            given.update({key: max(given.get(key, 0) - excess, 0) for key, excess in over.items()})
        return None

    found = attempt(room.budgets)
    if found is None:
        enough = sum(item.nbytes + room.slots * (item.slab if streams else 0) for item in items) + 2 * room.activations
        raise budget_error(room.budgets, enough, lambda budgets: attempt(budgets) is not None)
    return found


def checked_main(main_device: DeviceLike | None, budgets: Mapping[Key, int]) -> Key | None:
    """Return the key of the main device that was asked for.

    Raises:
        PlanError: it has no budget.
    """
    if main_device is None:
        return None
    key = main_device if isinstance(main_device, int) else device_key(main_device)
    if budgets.get(key, 0) <= 0:
        raise PlanError(f"main_device is {key!r}, but max_memory gives it no budget")
    return key


def _capped(items: Sequence[Item], room: Room, strategy: str) -> dict[Key, int]:
    """Return the budgets, the accelerators' lowered so that filling them in order is balanced."""
    budgets = dict(room.budgets)
    keys = room.accelerators
    if strategy not in ("balanced", "balanced_low_0") or len(keys) < 2:
        return budgets
    capacities = [max(budgets[key] - room.activations, 0) for key in keys]
    caps = balanced_caps([item.nbytes for item in items], capacities, strategy == "balanced_low_0")
    if caps != capacities:
        budgets.update({key: cap + room.activations for key, cap in zip(keys, caps, strict=True)})
    return budgets
