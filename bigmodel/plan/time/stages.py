"""Predicted seconds of a step on each of the devices that its parts are resident on, by its number of tokens."""

from __future__ import annotations

from ..memory.assignment import STEP, Assignment
from ..result.budgets import Key
from ..result.stages import ResidentStages
from .cost import CostModel
from .speculation import forward_over, pass_over

TOKENS = tuple(2**power for power in range(11))
"""Numbers of tokens whose seconds are predicted."""


def predict_stages(cost: CostModel, assignment: Assignment) -> ResidentStages | None:
    """Return the predicted seconds of steps on each device; None unless all parts of a model that generates are
    resident on several accelerators."""
    phases = cost.profile.phases
    devices = stage_devices(assignment)
    if len(devices) < 2 or not phases or phases[-1].name != STEP:
        return None
    seconds = []
    for tokens in TOKENS:
        compute = pass_over(cost, assignment, tokens).compute
        seconds.append((tokens, tuple(compute.get(device, 0.0) for device in devices)))
    return ResidentStages(devices, tuple(seconds), _launch_seconds(cost, assignment))


def predict_rows(cost: CostModel, assignment: Assignment) -> ResidentStages | None:
    """Return the predicted seconds of a forward on each device by its rows, up to those of the profile; None unless all
    parts are resident on several accelerators.

    The forward is the first phase of the profile: that of a prompt, of a model that generates.
    """
    devices = stage_devices(assignment)
    if len(devices) < 2:
        return None
    most = cost.profile.workload.batch_size
    seconds = []
    for rows in sorted({*(number for number in TOKENS if number < most), most, most + 1}):
        compute = forward_over(cost, assignment, rows).compute
        seconds.append((rows, tuple(compute.get(device, 0.0) for device in devices)))
    return ResidentStages(devices, tuple(seconds), _launch_seconds(cost, assignment, 0))


def stage_devices(assignment: Assignment) -> tuple[Key, ...]:
    """Return the accelerators that all units are resident on, in the order in which a step first comes to them; none
    if any unit is not."""
    return tuple(dict.fromkeys(assignment.execution)) if assignment.is_resident else ()


def _launch_seconds(cost: CostModel, assignment: Assignment, phase: int = -1) -> float:
    works = cost.units.works[phase]
    speeds = [cost.units.machine.device(cost.units.name(key)) for key in assignment.execution]
    return sum(len(works.get(unit, ())) * speed.call for unit, speed in enumerate(speeds))
