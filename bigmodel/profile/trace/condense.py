"""The events of a trace that books of memory need: what lives and dies within a unit's turn is taken together.

A unit runs on one device, so of what it allocates and frees before anything else happens only the most at once
matters. Of hundreds of events of a block some ten remain, and every device map is weighed by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .events import Allocate, Burst, Enter, Event, Free, Leave, Operation, Route, Routed, Scratch


def condense(events: Iterable[Event]) -> Iterator[Event]:
    """Yield events that give every device the same bytes at its highest mark and at the end, under any device map.

    Bytes are taken as they are: for an allocator that rounds each storage the events themselves are needed. What is
    between units, where devices depend on what is read, and what experts do, whose room is not known, stays as it is.
    """
    pending: list[Event] = []
    depth, routed = 0, False
    for event in events:
        if isinstance(event, Operation):
            continue
        if depth and not routed and isinstance(event, (Allocate, Free, Scratch)):
            pending.append(event)
            continue
        yield from _together(pending)
        pending = []
        yield event
        depth += isinstance(event, Enter) - isinstance(event, Leave)
        routed = isinstance(event, Route) or (routed and not isinstance(event, Routed))
    yield from _together(pending)


def _together(events: Sequence[Event]) -> Iterator[Event]:
    """Yield bursts in place of the storages that live and die within `events`, and the other events."""
    dying = {event.storage for event in events if isinstance(event, Free)}
    own = {event.storage: event.nbytes for event in events if isinstance(event, Allocate) and event.storage in dying}
    now = peak = 0
    for event in events:
        if isinstance(event, Scratch):
            peak = max(peak, now + event.nbytes)
        elif isinstance(event, Allocate) and event.storage in own:
            now += event.nbytes
            peak = max(peak, now)
        elif isinstance(event, Free) and event.storage in own:
            now -= own[event.storage]
        else:
            if now or peak:
                yield Burst(peak, now)
            now = peak = 0
            yield event
    if now or peak:
        yield Burst(peak, now)
