"""Assemble the `Plan` of an assignment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...devices import HOST, total_host_bytes
from ...limits import PINNED_SHARE
from ...profile import Profile
from ..result.budgets import Key, is_accelerator
from ..result.plan import DevicePlan, Part, Plan, Prediction
from .assignment import Assignment, device_uses, passing_usage, with_workspace_apart


def assemble(
    profile: Profile,
    assignment: Assignment,
    budgets: Mapping[Key, int],
    strategy: str,
    prediction: Prediction | None = None,
    reasons: Mapping[int, str] | None = None,
    pinned_memory: int | None = None,
    resident_limit: int | None = None,
) -> Plan:
    """Return the plan of an assignment.

    Args:
        profile: the model.
        assignment: storage and execution device of its units.
        budgets: bytes by device key.
        strategy: how the assignment was found.
        prediction: its predicted time.
        reasons: why a unit is where it is, by position, where more is known than the place itself says.
        pinned_memory: bytes of host memory that may be pinned; None: a share of this host's.
        resident_limit: bytes of the host that the process may take; None: as many as are free.
    """
    uses = with_workspace_apart(device_uses(profile, assignment), profile, assignment)
    return Plan(
        model=profile.name,
        strategy=strategy,
        main_device=assignment.main,
        devices=with_budgets(uses, budgets),
        parts=parts_of(profile, assignment, reasons),
        slots=assignment.slots,
        slot_bytes=assignment.slot_bytes,
        offload_dtype=profile.offload_dtype,
        offload_buffers=assignment.stream_buffers,
        expert_cache=passing_usage(profile.units, assignment).expert_cache,
        staging_bytes=assignment.staging_bytes,
        pinned_memory=int(PINNED_SHARE * total_host_bytes()) if pinned_memory is None else pinned_memory,
        resident_limit=resident_limit,
        batch_size=profile.workload.batch_size,
        context_length=profile.workload.context_length,
        new_tokens=profile.workload.new_tokens,
        dtype=profile.dtype,
        prediction=prediction,
        notes=_notes(profile),
    )


def with_budgets(uses: Mapping[Key, DevicePlan], budgets: Mapping[Key, int]) -> dict[Key, DevicePlan]:
    """Return what each device takes with what it may, also for devices that take nothing."""
    keys = [*budgets, *(key for key in uses if key not in budgets)]
    return {key: replace(uses.get(key, DevicePlan(key, None)), budget=budgets.get(key)) for key in keys}


def parts_of(profile: Profile, assignment: Assignment, reasons: Mapping[int, str] | None = None) -> tuple[Part, ...]:
    """Return the units of a profile as they are assigned; `reasons` as for `assemble`."""
    return tuple(
        Part(
            name=unit.name,
            device=assignment.storage[index],
            runs_on=assignment.execution[index],
            bytes=unit.nbytes,
            reason=(reasons or {}).get(index) or reason(assignment, index, profile),
            kind=unit.class_name,
            computed_below=assignment.computed_below.get(index, 0),
        )
        for index, unit in enumerate(profile.units)
        if unit.tensors
    )


def reason(assignment: Assignment, index: int, profile: Profile) -> str:
    """Return why unit `index` is where it is, as far as its place tells."""
    storage, execution = assignment.storage[index], assignment.execution[index]
    if is_accelerator(storage):
        if profile.units[index].is_tensor:
            return "held by a split module itself, so resident on the main device"
        return "resident: it fits"
    place, source = ("in RAM", "RAM") if storage == HOST else ("on disk", "disk")
    if index in assignment.computed_below:
        return "does not fit beside the rest: streamed from RAM for a prompt, computed on the CPU in steps"
    if is_accelerator(execution):
        return f"does not fit beside the rest: streamed from {source}"
    if not is_accelerator(assignment.main):
        return "runs on the CPU" if storage == HOST else "runs on the CPU, viewed in the checkpoint: RAM is full"
    if profile.units[index].is_lookup:
        return f"looked up {place}: a few rows cross the link, not the table"
    return f"computed on the CPU, where it lies {place}"


def _notes(profile: Profile) -> tuple[str, ...]:
    return (f"{profile.unknown}; plan with sample_inputs to count all",) if profile.unknown else ()
