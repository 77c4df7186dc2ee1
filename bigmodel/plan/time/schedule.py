"""How long a pass over a model takes when some of its parts are fetched while others compute.

    compute   runs part after part, in order
    link      brings streamed parts into slots, one after another, beside compute

With two slots or more, the next streamed part's fetch begins when the one before it is wanted; with one, when that
part itself is wanted. The link brings one thing after another: a part's inputs, be they few bytes, wait for the weights
that are on their way. What is simulated is what `dispatch`'s streamer does, pass after pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PASSES = 3
"""Passes that are simulated; the last is one of many equal ones."""


@dataclass(frozen=True)
class Visit:
    """One part's turn.

    Attributes:
        compute: seconds it computes where it runs, and its inputs come there over other links.
        fetch: seconds the link brings it; 0 if it does not come over the link.
        asked: seconds the link brings what the part asks for while it runs, and waits for: experts just chosen.
        inputs: seconds the link brings what the part is called with, before all else.
    """

    compute: float
    fetch: float = 0.0
    asked: float = 0.0
    inputs: float = 0.0


def seconds_of_pass(visits: Sequence[Visit], slots: int) -> float:
    """Return how long one pass of many takes.

    Args:
        visits: in the order of execution.
        slots: how many fetched parts may be on the device at once.
    """
    total = sum(visit.compute + visit.asked + visit.inputs for visit in visits)
    streamed = [position for position, visit in enumerate(visits) if visit.fetch]
    if len(streamed) <= max(slots, 1):
        return total  # they stay in their slots
    if slots < 2:
        return total + sum(visits[position].fetch for position in streamed)
    return _simulated(visits, streamed)


def _simulated(visits: Sequence[Visit], streamed: Sequence[int]) -> float:
    following = {position: streamed[(turn + 1) % len(streamed)] for turn, position in enumerate(streamed)}
    now = link_free = begun = 0.0
    arrived = visits[streamed[0]].fetch
    link_free = arrived
    for _ in range(PASSES):
        begun = now
        for position, visit in enumerate(visits):
            if visit.inputs:
                link_free = now = max(now, link_free) + visit.inputs
            if visit.fetch:
                # Wanted now: the next one's fetch is queued behind its own.
                link_free = max(now, link_free) + visits[following[position]].fetch
                now, arrived = max(now, arrived), link_free
            if visit.asked:
                link_free = now = max(now, link_free) + visit.asked
            now += visit.compute
    return now - begun
