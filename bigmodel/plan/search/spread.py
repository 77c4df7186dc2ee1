"""Streaming over several links: the streamed units of an assignment run on several accelerators in turns.

All links then fetch at once. Activations move from one accelerator to the next, weights do not. Each unit runs on the
accelerator whose link will have brought it first, behind the units that it brings already: links of one rate take
turns, and one of twice the rate takes two of three units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...devices import DISK
from ..memory.assignment import Assignment
from ..result.budgets import Key, is_accelerator
from ..time.unit_cost import UnitCost


def spread(cost: UnitCost, known: Assignment, devices: Sequence[Key], slots: int) -> Assignment:
    """Return an assignment with its streamed units spread over accelerators. Budgets are not checked.

    What stays on the main device: units that share tensors with others or whose weights operations there read, units
    with experts that are fetched one by one, and units that the host computes in steps.

    Args:
        cost: predicts the seconds of a fetch on each link.
        known: the assignment; what it streams, it streams to its main device.
        devices: the other accelerators.
        slots: how many streamed units may be on one device at once.
    """
    if not is_accelerator(known.main):
        return known
    units, phase = cost.profile.units, len(cost.profile.phases) - 1
    on_disk = sum(unit.weights for unit, key in zip(units, known.storage, strict=True) if key == DISK)
    movable = cost.separate - cost.profile.lending - known.computed_below.keys()
    busy = dict.fromkeys((known.main, *devices), 0.0)
    turns = dict.fromkeys(busy, 0)
    execution = list(known.execution)
    for index, storage in enumerate(known.storage):
        if not known.streamed(index):
            continue
        able = busy if index in movable else (known.execution[index],)
        fetches = {key: cost.fetch(phase, index, (storage, key), on_disk, known.stream_buffers) for key in able}
        chosen = min(fetches, key=lambda key: busy[key] + fetches[key])
        execution[index] = chosen
        busy[chosen] += fetches[chosen]
        turns[chosen] += bool(units[index].nbytes)
    return replace(known, execution=tuple(execution), slots=min(slots, max(turns.values())))
