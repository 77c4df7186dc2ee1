"""One pass over the batches of indices of one process, and what is known of each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple


class IndexBatch(NamedTuple):
    """One process's batch.

    Attributes:
        indices: what the data loader fetches; the first `real` of them are this process's own.
        rows, real: how many indices, and how many are not repeated ones.
        uneven: whether any process's batch of this round has repeated samples or another length.
        total_real: real samples of all processes in this round.
    """

    indices: Any
    rows: int
    real: int
    uneven: bool
    total_real: int


class BatchStream:
    """One pass over a process's batches. Reads one batch of indices ahead, so that the last is known as such."""

    def __init__(self, batches: Iterator[IndexBatch], skip: int, on_start: Callable[[], None] | None) -> None:
        self._batches = batches
        self._skip = skip
        self._on_start = on_start
        self._ahead: IndexBatch | None = None
        self._started = False
        self.notes: deque[IndexBatch] = deque()
        self.produced = 0

    def start(self) -> None:
        """Draw the order of this pass, unless it is drawn."""
        if self._started:
            return
        self._started = True
        if self._on_start is not None:
            self._on_start()
        self._ahead = next(islice(self._batches, self._skip, None), None)

    @property
    def exhausted(self) -> bool:
        """Whether there is no batch after those produced."""
        return self._started and self._ahead is None

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        self.start()
        current = self._ahead
        if current is None:
            raise StopIteration
        self._ahead = next(self._batches, None)
        self.produced += 1
        self.notes.append(current._replace(indices=None))
        return current.indices
