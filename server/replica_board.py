"""What each replica said last. Lives in one process of the cluster, to which every replica has a way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SILENCE = 10.0  # seconds after which a replica that says nothing is gone


@dataclass(frozen=True)
class Word:
    """What a replica says of itself: its numbers in the format of Prometheus, and what /plan shows of it."""

    metrics: str
    view: dict[str, Any]


class Board:
    """The last word of each replica, by the replica's name; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[float, Word]] = {}

    def put(self, replica: str, word: Word) -> None:
        """``replica`` says this now."""
        self._said[replica] = (self._clock(), word)

    def words(self) -> tuple[dict[str, Word], dict[str, Word]]:
        """The words of the replicas that are there, and the last ones of those that are gone."""
        since = self._clock() - _SILENCE
        there = {name: word for name, (at, word) in self._said.items() if at >= since}
        gone = {name: word for name, (at, word) in self._said.items() if at < since}
        return there, gone
