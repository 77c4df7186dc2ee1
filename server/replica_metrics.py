"""One /metrics for all replicas: each tells its numbers to a board, and whichever is asked answers for all.

A scrape reaches any one replica. The board is an actor of the Ray cluster, so the replicas may be on several machines.
What the others have counted is at most :data:`PERIOD` seconds old.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from server.errors import APIError
from server.merged_metrics import merge

logger = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between two words of a replica to the board
_SILENCE = 10.0  # seconds after which a replica that says nothing is gone


class Board:
    """What each replica said last. Lives in one process of the cluster; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[float, str]] = {}

    def put(self, replica: str, text: str) -> None:
        """``replica`` has these numbers now."""
        self._said[replica] = (self._clock(), text)

    def texts(self) -> tuple[list[str], list[str]]:
        """The numbers of the replicas that are there, and the last ones of those that are gone."""
        now = self._clock()
        live = [text for at, text in self._said.values() if now - at <= _SILENCE]
        gone = [text for at, text in self._said.values() if now - at > _SILENCE]
        return live, gone


class SharedMetrics:
    """A replica's way to the board. ``own`` gives the replica's own numbers, ``board`` is the :class:`Board` actor."""

    def __init__(self, own: Callable[[], bytes], board: Any) -> None:
        self._own = own
        self._board = board
        self._name = uuid.uuid4().hex
        threading.Thread(target=self._tell, name="bigmodel-metrics", daemon=True).start()

    def render(self) -> bytes:
        """The numbers of all replicas together; 503 while the board cannot be reached."""
        import ray
        from ray.exceptions import RayError

        try:
            ray.get(self._board.put.remote(self._name, self._own().decode()), timeout=5)
            live, gone = ray.get(self._board.texts.remote(), timeout=5)
        except RayError as error:
            raise APIError(
                503, "the numbers of the other replicas cannot be had", code="metrics_unavailable"
            ) from error
        return merge(live, gone)

    def _tell(self) -> None:
        while True:  # for as long as the replica's process lives
            # Not waited for: a board that is being restarted misses a word and hears the next one.
            self._board.put.remote(self._name, self._own().decode())
            time.sleep(PERIOD)
