"""One /metrics and one /plan for all replicas: each tells a board of itself, and whichever is asked answers for all.

A request reaches any one replica. What it knows of the others is at most :data:`PERIOD` seconds old.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from bigmodel.server.merged_metrics import merge
from bigmodel.server.replica_board import Word

logger = logging.getLogger(__name__)

PERIOD = 0.5  # seconds between two words of a replica to the board


class BoardLike(Protocol):
    """A :class:`bigmodel.server.replica_board.Board`, here or in another process."""

    def put(self, replica: str, word: Word) -> object: ...

    def words(self) -> tuple[dict[str, Word], dict[str, Word]]: ...


class Fleet:
    """All replicas as one of them knows them. ``own`` gives this replica's own word."""

    def __init__(self, own: Callable[[], Word], board: BoardLike, name: str | None = None) -> None:
        self._own = own
        self._board = board
        self._name = name or uuid.uuid4().hex[:8]

    def start(self) -> None:
        """Tell the board of this replica from now on, for as long as its process lives."""
        threading.Thread(target=self._keep_telling, name="bigmodel-fleet", daemon=True).start()

    def metrics(self) -> bytes:
        """The numbers of all replicas together, in the format of Prometheus."""
        there, gone = self._words()
        return merge([word.metrics for word in there.values()], [word.metrics for word in gone.values()])

    def views(self) -> list[dict[str, Any]]:
        """What /plan shows of each replica that is there, with its ``name`` and ``machine``; in the order of names."""
        there, _ = self._words()
        return [{"name": name, **there[name].view} for name in sorted(there)]

    def _words(self) -> tuple[dict[str, Word], dict[str, Word]]:
        self._tell()  # its own word is new, those of the others nearly
        return self._board.words()

    def _tell(self) -> None:
        word = self._own()
        self._board.put(self._name, Word(word.metrics, {"machine": socket.gethostname(), **word.view}))

    def _keep_telling(self) -> None:
        while True:
            try:
                self._tell()
            except Exception:  # one word is missed; without the next ones this replica would count as gone
                logger.exception("replica %s could not tell how it is", self._name)
            time.sleep(PERIOD)
