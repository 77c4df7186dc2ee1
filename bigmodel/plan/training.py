"""`plan_training`: storage device of every part of a model during training.

Weights, gradients and optimizer state of a streamed part are on the host; its slot and its current activations are on
the accelerator. All of a resident part is on the accelerator, including the activations that its backward needs. As
many parts are resident as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import nn

from ..arguments import check_model, optional_whole_number, whole_number
from ..devices import DISK, HOST, DeviceLike
from ..errors import BudgetError, PlanError
from ..limits import DEFAULT_SLOTS, GRADIENT_BYTES
from ..profile import Profile, profile_model
from ..profile.trace.workload import trained_length
from ..profile.training.step import TrainingStep, check_optimizer
from .memory.assignment import (
    Assignment,
    default_pinned_memory,
    loading_bytes,
    parts_of,
    passing_usage,
    stored_tensors,
    with_budgets,
)
from .memory.staging import gradient_bytes
from .memory.usage import ACTIVATIONS, BUFFERS, SLOTS, TRAINING, WEIGHTS, MemoryUsage, PassingUnit
from .result.budgets import Key, budget_error, checked_main, device_type_of, is_accelerator, read_budgets, with_headroom
from .result.plan import Plan
from .search.items import Capacity, tie_groups

STRATEGY = "training"

EXPERTS_WHOLE = "experts are counted as if all of them were fetched together, which is an upper bound"
NOT_ON_DISK = "the disk does not help: weights that are trained are not held there"

Attempt = tuple[Assignment, MemoryUsage]
"""An assignment, and the bytes of each device under it."""


def plan_training(
    model: nn.Module,
    max_memory: Mapping[DeviceLike, int | str] | None = None,
    batch_size: int = 1,
    context_length: int | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
    main_device: DeviceLike | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
) -> Plan:
    """Return a plan under which no device passes its budget while `model` is trained.

    Training steps are run on fake tensors, with the parts on the host streamed as `dispatch_model` streams them; a
    bisection finds the most parts that can be resident. No weights are planned on disk. All experts of a mixture are
    counted as if they were fetched together, which is an upper bound.

    Args:
        model: a transformers model of text or images, also on meta; not changed. Frozen parameters get no gradient.
        max_memory: budgets as `get_max_memory` takes them, of one accelerator and the host; None: what is free.
        batch_size: samples of a step.
        context_length: tokens of each; None: as `profile_model` does.
        optimizer: one of `OPTIMIZERS`, or a function of parameters that returns one.
        main_device: the accelerator to train on; None: the one with a budget. Others are not used.
        no_split_module_classes: class names not to be split; None: find them.

    Returns:
        The plan, for `dispatch_model`. Each device's `training` is the bytes of gradients and optimizer state.

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
        PlanError: an argument is invalid, or the model has no loss.
        SizeError: a budget is not a size.
        DeviceError: a budget's device or the main device does not exist.
    """
    check_model(model)
    check_optimizer(optimizer)
    batch_size = whole_number("batch_size", batch_size, least=1)
    context_length = optional_whole_number("context_length", context_length, least=1)
    budgets = _budgets(max_memory, main_device)
    device_type = device_type_of(budgets)
    profile = profile_model(
        model, context_length=0, no_split_module_classes=no_split_module_classes, device_type=device_type
    )
    main = Capacity(budgets, main_device=checked_main(main_device, budgets)).main
    candidates = _candidates(profile, main)
    may_pin = default_pinned_memory()

    @cache
    def attempt(number: int) -> Attempt:
        assignment = _assignment(profile, candidates[number], main)
        names = [profile.units[index].name for index in candidates[number]]
        step = TrainingStep(model, batch_size, context_length, optimizer, False, device_type, names)
        step.record()
        usage = _usage(profile, step, assignment, main, device_type)
        usage.add(HOST, SLOTS, _gradient_bytes(model, profile, assignment, may_pin))
        return assignment, usage

    found = _first_that_fits(attempt, len(candidates), budgets)
    if found is None:
        raise _shortage(attempt, len(candidates), budgets)
    assignment, usage = found
    uses = usage.device_plans()
    return Plan(
        model=profile.name,
        strategy=STRATEGY,
        main_device=main,
        devices=with_budgets(uses, budgets),
        parts=parts_of(profile, assignment),
        slots=assignment.slots,
        slot_bytes=assignment.slot_bytes,
        expert_cache=passing_usage(profile.units, assignment).expert_cache,
        pinned_memory=may_pin,
        upload_bytes=loading_bytes(stored_tensors(profile, assignment), uses, budgets, may_pin),
        gradient_bytes=_gradient_bytes(model, profile, assignment, may_pin),
        batch_size=batch_size,
        context_length=trained_length(model, context_length),
        new_tokens=0,
        notes=(EXPERTS_WHOLE,) if any(unit.experts for unit in profile.units) else (),
    )


def _first_that_fits(attempt: Callable[[int], Attempt], count: int, budgets: Mapping[Key, int]) -> Attempt | None:
    """Return the first attempt that keeps to the budgets, by bisection; None if none does.

    Args:
        attempt: by number; the higher the number, the more parts are on the host.
        count: how many attempts there are.
        budgets: bytes by device key.
    """
    low, high = 0, count - 1
    found: Attempt | None = None
    while low <= high:  # the accelerator holds less with every part on the host
        middle = (low + high) // 2
        made = attempt(middle)
        over = made[1].over(budgets)
        found = found if over else made
        low, high = (middle + 1, high) if any(map(is_accelerator, over)) else (low, middle - 1)
    return found


def _shortage(attempt: Callable[[int], Attempt], count: int, budgets: Mapping[Key, int]) -> BudgetError:
    """Return the error that names the smallest budgets under which an attempt fits."""
    enough = max(use.total(key) for number in (0, count - 1) for use in [attempt(number)[1]] for key in use.devices)
    error = budget_error(budgets, enough, lambda given: _first_that_fits(attempt, count, given) is not None)
    return BudgetError(f"{error}; {NOT_ON_DISK}") if budgets.get(DISK) else error


def _budgets(max_memory: Mapping[DeviceLike, int | str] | None, main_device: DeviceLike | None) -> dict[Key, int]:
    """Return the given budgets, or what is free; PlanError if they leave open which accelerator to train on."""
    if max_memory is None:
        return with_headroom(read_budgets(None))
    budgets = read_budgets(max_memory)
    given = [key for key, size in budgets.items() if size > 0 and is_accelerator(key)]
    if len(given) > 1 and main_device is None:
        raise PlanError(
            f"training is planned for one accelerator and the host, and max_memory has budgets of {given}; give one of "
            "them, or name main_device. Several train a copy or a share each: see `launch`, and `plan --ranks`"
        )
    return budgets


def _candidates(profile: Profile, main: Key) -> list[tuple[int, ...]]:
    """Return the units held on the host in each attempt: none, spread blocks, all blocks, others, then lookups."""
    if not is_accelerator(main):
        return [()]
    units = profile.units
    movable = [
        group.members
        for group in tie_groups(units)
        if group.weights and not any(units[index].is_tensor for index in group.members)
    ]
    blocks = [members for members in movable if all(units[index].is_block for index in members)]
    rest = [members for members in movable if members not in blocks]
    rest.sort(key=lambda members: any(units[index].is_lookup for index in members))
    total = len(blocks)
    spread = [[blocks[(2 * turn + 1) * total // (2 * count)] for turn in range(count)] for count in range(total + 1)]
    chosen = [*spread, *([*blocks, *rest[: count + 1]] for count in range(len(rest)))]
    return [tuple(sorted(index for members in away for index in members)) for away in chosen]


def _assignment(profile: Profile, away: Sequence[int], main: Key) -> Assignment:
    storage = tuple(HOST if index in away else main for index in range(len(profile.units)))
    streamed = [profile.units[index] for index in away if not profile.units[index].is_lookup]
    execution = tuple(HOST if index in away and unit.is_lookup else main for index, unit in enumerate(profile.units))
    slot_bytes = max((unit.slot_bytes() for unit in streamed), default=0)
    return Assignment(storage, execution, main, min(DEFAULT_SLOTS, len(streamed)), slot_bytes)


def _gradient_bytes(model: nn.Module, profile: Profile, assignment: Assignment, may_pin: int) -> int:
    """Return the bytes through which gradients of streamed parts reach the host."""
    streamed = [unit.name for index, unit in enumerate(profile.units) if assignment.streamed(index)]
    parts = (model.get_submodule(name).parameters() for name in streamed)
    trained = ([weight.nbytes for weight in part if weight.requires_grad] for part in parts)
    return gradient_bytes(trained, min(GRADIENT_BYTES, may_pin))


def _usage(profile: Profile, step: TrainingStep, assignment: Assignment, main: Key, device_type: str) -> MemoryUsage:
    usage = MemoryUsage(main, assignment.slots)
    kinds = {main: device_type} if main == HOST else {main: device_type, HOST: HOST}
    for device, kind in kinds.items():
        use, peak = step.uses[kind], step.peak(kind)
        kept = use.gradients + use.state
        usage.add(device, WEIGHTS, use.weights)
        usage.add(device, BUFFERS, use.buffers)
        usage.add(device, TRAINING, min(kept, peak - use.weights - use.buffers))
        usage.add(device, ACTIVATIONS, max(peak - use.weights - use.buffers - kept, 0))
    for index, unit in enumerate(profile.units):
        if assignment.streamed(index):  # with all its experts
            usage.add_unit(PassingUnit(slot=unit.slot_bytes()), HOST, main)
    return usage
