"""Fair shares of what is scarce: each client has a few turns at once, all together no more than there are.

A client is a key, or an address where no keys are needed. Those that wait are served client by client, so that one with
many requests delays another by one turn and not by all of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque

from starlette.types import Scope

KEY = "bigmodel.key"
"""Where a scope holds the key that a request was allowed with."""


def client_of(scope: Scope) -> str:
    """Return the client's key, or its address where no key was needed."""
    if KEY in scope:
        return str(scope[KEY])
    address = scope.get("client")
    return str(address[0]) if address else ""


class Shares:
    """Turns of clients: at most `each` of one client at once, and `total` of all. For one event loop."""

    def __init__(self, each: int, total: int) -> None:
        self._each = each
        self._free = total
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next client first

    @property
    def idle(self) -> bool:
        """Whether nobody has a turn or waits for one."""
        return not self._held and not self._waiting

    def take(self, client: str) -> bool:
        """Take a turn if there is one at once."""
        if not self._free or self._held[client] >= self._each or client in self._waiting:
            return False
        self._begin(client)
        return True

    async def wait(self, client: str, seconds: float | None = None) -> None:
        """Take a turn when there is one. Raises TimeoutError when there is none for ``seconds``."""
        if self.take(client):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await asyncio.wait({turn}, timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(client)
            else:
                self._forget(client, turn)
            raise
        if not turn.done():
            self._forget(client, turn)
            raise TimeoutError

    def give_back(self, client: str) -> None:
        """End a turn; whoever waits the longest of those who may begin has it next."""
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        while self._free:
            following = next((one for one in self._waiting if self._held[one] < self._each), None)
            if following is None:
                return
            turn = self._waiting[following].popleft()
            if self._waiting[following]:
                self._waiting.move_to_end(following)  # clients take turns
            else:
                del self._waiting[following]
            self._begin(following)
            turn.set_result(None)

    def _begin(self, client: str) -> None:
        self._free -= 1
        self._held[client] += 1

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]
