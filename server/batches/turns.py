"""Places of the requests that batches have answered at once: few, and owners take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

POLL_SECONDS = 0.02
"""How often requests that wait ask whether they may begin."""


class Turns:
    """Places of requests. For one event loop.

    Args:
        may_begin: Whether another request of a model may begin beside so many.
    """

    def __init__(self, may_begin: Callable[[int, str | None], bool]) -> None:
        self._may_begin = may_begin
        self._held = 0
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], str | None]]] = OrderedDict()  # next first
        self._paused: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, owner: str, model: str | None) -> None:
        """Take a place when there is one."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((place, model))
        self._begin()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back()
            else:
                self._forget(owner, place)
            raise

    def give_back(self) -> None:
        """End a turn."""
        self._held -= 1
        self._begin()

    def pause(self, owner: str, seconds: float) -> None:
        """Let no request of an owner begin for so long."""
        self._paused[owner] = asyncio.get_running_loop().time() + seconds

    def _begin(self) -> None:
        """Give places to those that wait, and look again soon if some still do."""
        while (owner := self._next()) is not None:
            place, _ = self._waiting[owner].popleft()
            if self._waiting[owner]:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            if not place.done():  # else it is cancelled, and its task does not know yet
                self._held += 1
                place.set_result(None)
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_SECONDS, self._again)

    def _again(self) -> None:
        self._timer = None
        self._begin()

    def _next(self) -> str | None:
        time = asyncio.get_running_loop().time()
        for owner, waiting in self._waiting.items():
            if self._paused.get(owner, 0.0) <= time and self._may_begin(self._held, waiting[0][1]):
                self._paused.pop(owner, None)
                return owner
        return None

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        left = deque(each for each in self._waiting.get(owner, ()) if each[0] is not place)
        if left:
            self._waiting[owner] = left
        else:
            self._waiting.pop(owner, None)
