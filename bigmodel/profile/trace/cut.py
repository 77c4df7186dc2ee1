"""Cuts one long recording into traces that know what is alive at their start."""

from __future__ import annotations

from .trace import OUTSIDE, Allocate, Enter, Event, Free, Held, Leave, Trace


def cut(events: list[Event], marks: list[tuple[int, int]]) -> list[Trace]:
    """Cut one long recording into traces.

    Args:
        events: everything recorded.
        marks: (first, end) positions of each trace, ascending; what lies between belongs to none.

    Returns:
        One trace each, with what is alive at its start.
    """
    traces = []
    alive: dict[int, Held] = {}
    unit = OUTSIDE
    position = 0
    for first, end in marks:
        for event in events[position:first]:
            unit = _follow_life(event, unit, alive)
        traces.append(Trace(tuple(events[first:end]), tuple(alive.values())))
        for event in events[first:end]:
            unit = _follow_life(event, unit, alive)
        position = end
    return traces


def _follow_life(event: Event, unit: int, alive: dict[int, Held]) -> int:
    if isinstance(event, Allocate):
        alive[event.storage] = Held(event.storage, event.nbytes, unit)
    elif isinstance(event, Free):
        alive.pop(event.storage, None)
    elif isinstance(event, Enter):
        return event.unit
    elif isinstance(event, Leave):
        return OUTSIDE
    return unit
