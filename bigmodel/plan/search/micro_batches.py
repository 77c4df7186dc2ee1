"""The micro-batches in which a forward is fastest, of a model that is resident on several accelerators.

Of many, all accelerators compute at once most of the time: the first and the last stage idle for as long as one takes
to get there. But each takes the host's time to launch, and a small one takes as long as reading the weights does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...profile import Profile
from ...profile.machine.machine import MachineProfile
from ..memory.assignment import Assignment
from ..result.plan import Plan
from ..result.stages import WORTHWHILE, ResidentStages, stage_runs
from ..time.cost import CostModel
from ..time.stages import predict_rows

AS_FAST = 1.02
"""The largest micro-batches are chosen that take at most so many times the seconds of the fastest ones."""


NO_STAGES = "a forward is computed whole, and not in micro-batches: not all parts are resident on several accelerators"


def with_micro_batches(
    plan_of: Callable[[Profile], Plan],
    profile: Profile,
    size: int | str,
    forward_of: Callable[[int], Profile],
    speeds: Callable[[], MachineProfile],
) -> Plan:
    """Return the plan of a profile whose forward is computed in micro-batches, if its parts are resident on several
    accelerators; else the plan of the whole forward.

    Args:
        plan_of: returns the plan of a profile.
        profile: the model.
        size: rows of a micro-batch; "auto": those with which the batch is predicted to be fastest.
        forward_of: returns the profile of a forward of so many rows.
        speeds: returns the machine to predict with; called for "auto" alone.
    """
    rows = profile.workload.batch_size
    whole: Plan | None = None
    if isinstance(size, str):
        whole = plan_of(profile)
        best = best_micro_batch(whole, forward_of(rows), speeds())
        if best is None:
            return whole
        size = best
    made = plan_of(replace(profile, micro_batch=forward_of(min(size, rows))))
    if stage_runs(made):
        return replace(made, micro_batch_size=size)
    return whole or replace(made, notes=(*made.notes, NO_STAGES))


def best_micro_batch(plan: Plan, profile: Profile, machine: MachineProfile) -> int | None:
    """Return the rows of the micro-batches in which a forward of a profile's batch is predicted to be fastest under a
    plan; None if it is about as fast whole, or if the model has no stages.

    Args:
        plan: where the parts of the model are.
        profile: the model, of a forward of the whole batch.
        machine: the machine.
    """
    rows = profile.workload.batch_size
    stages = predict_rows(CostModel(profile, machine), _assignment(plan, profile)) if profile.phases else None
    if stages is None or rows < 2:
        return None
    sizes = {-(-rows // count) for count in range(1, rows + 1)}
    seconds = {size: batch_seconds(stages, rows, size) for size in sizes}
    fastest = min(seconds.values())
    size = max(size for size, taken in seconds.items() if taken <= AS_FAST * fastest)
    return size if WORTHWHILE * seconds[size] <= seconds[rows] else None


def batch_seconds(stages: ResidentStages, rows: int, size: int) -> float:
    """Return the seconds in which all rows are computed, `size` at a time, one behind another through the devices."""
    free = [0.0] * len(stages.devices)
    done = launched = 0.0
    for first in range(0, rows, size):
        launched += stages.launch
        done = launched
        for at, seconds in enumerate(stages.step_seconds(min(size, rows - first))):
            done = free[at] = max(done, free[at]) + seconds
    return done


def _assignment(plan: Plan, profile: Profile) -> Assignment:
    """Return where a plan has the units of a profile."""
    parts = {part.name: part for part in plan.parts}
    held = [parts.get(unit.name) if unit.tensors else None for unit in profile.units]
    storage = tuple(plan.main_device if part is None else part.device for part in held)
    execution = tuple(plan.main_device if part is None else part.runs_on for part in held)
    return Assignment(storage, execution, plan.main_device)
