"""From the engine's thread to the event loop: one wake-up for a burst of events, however many requests they are for."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from bigmodel.server.engine.request import Done, Event, Failed


class Relay:
    """Carries events of every request to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[Slot, Event]] = deque()
        self._scheduled = False

    @property
    def undelivered(self) -> int:
        """Events on their way to the loop."""
        return len(self._pending)

    def post(self, slot: Slot, event: Event) -> None:
        """Called from the engine's thread."""
        self._pending.append((slot, event))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop is closed: nobody is left to read the event, or any later one.
                self._pending.clear()
                self._scheduled = False

    def _deliver(self) -> None:
        # Cleared first: an event appended from now on schedules another delivery, none is left lying.
        self._scheduled = False
        while self._pending:
            slot, event = self._pending.popleft()
            slot.mailbox.receive(slot.number, event)


class Mailbox:
    """The events of the engine requests that one HTTP request became, in the order they happened.

    ``at_once``: nobody wants to see them before the last one, so each engine request's arrive together with its last.
    The event loop then sleeps while the engine computes.
    """

    def __init__(self, relay: Relay, *, at_once: bool = False) -> None:
        self._relay = relay
        self.at_once = at_once
        self._events: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self.finished: set[int] = set()

    def slot(self, number: int) -> Slot:
        """The sink of engine request ``number``."""
        return Slot(self, self._relay, number)

    def receive(self, number: int, event: Event) -> None:
        """Called in the event loop."""
        self._events.append((number, event))
        if isinstance(event, (Done, Failed)):
            self.finished.add(number)
        self._arrived.set()

    async def take(self) -> list[tuple[int, Event]]:
        """All (request number, event) that have arrived; waits for one."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        return events


@dataclass(frozen=True)
class Slot:
    """Puts the events of one engine request into a mailbox. Called from the engine's thread."""

    mailbox: Mailbox
    relay: Relay
    number: int
    _held: list[Event] = field(default_factory=list)

    def put(self, event: Event) -> None:
        self._held.append(event)
        if self.mailbox.at_once and not isinstance(event, (Done, Failed)):
            return
        for held in self._held:
            self.relay.post(self, held)
        self._held.clear()
