"""Seconds of a pass in which the link fetches some units while others compute.

Units compute one after another, in order; the link fetches streamed units into slots, one after another, beside them.
With two slots or more, the next streamed unit's fetch is queued when the one before it is wanted; with one slot, when
the unit itself is wanted. The link serves requests in order: a unit's inputs, however few bytes, wait for the weights
queued before them. This is what the streamer of `dispatch` does, pass after pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 3
"""Passes to simulate; from then on all passes take as long as the last one."""


@dataclass(frozen=True)
class Visit:
    """One unit in a pass.

    Attributes:
        compute: seconds it computes, and in which its inputs cross other links than the main device's.
        fetch: seconds in which the link fetches its weights; 0 if it is not streamed.
        on_demand: seconds in which the link fetches the experts its router has chosen, while it waits.
        inputs: seconds in which the link transfers its inputs, before all else.
    """

    compute: float
    fetch: float = 0.0
    on_demand: float = 0.0
    inputs: float = 0.0


def seconds_of_pass(visits: Sequence[Visit], slots: int) -> float:
    """Return the seconds of one pass among many.

    Args:
        visits: in the order of execution.
        slots: how many fetched units may be on the device at once.
    """
    total = sum(visit.compute + visit.on_demand + visit.inputs for visit in visits)
    streamed = [position for position, visit in enumerate(visits) if visit.fetch]
    if len(streamed) <= max(slots, 1):
        return total  # they stay in their slots from one pass to the next
    if slots < 2:
        return total + sum(visits[position].fetch for position in streamed)
    return _simulated(visits, streamed)


def _simulated(visits: Sequence[Visit], streamed: Sequence[int]) -> float:
    following = {position: streamed[(turn + 1) % len(streamed)] for turn, position in enumerate(streamed)}
    now = started = 0.0
    arrived = link_free = visits[streamed[0]].fetch
    for _ in range(PASSES):
        started = now
        for position, visit in enumerate(visits):
            if visit.inputs:
                link_free = now = max(now, link_free) + visit.inputs
            if visit.fetch:
                # Its own fetch was queued before; the next one's is queued now.
                link_free = max(now, link_free) + visits[following[position]].fetch
                now, arrived = max(now, arrived), link_free
            if visit.on_demand:
                link_free = now = max(now, link_free) + visit.on_demand
            now += visit.compute
    return now - started
