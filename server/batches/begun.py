"""Requests that a process may have ended with: they are asked again alone, and after three such ends no more.

A request that takes more memory than there is, or that a kernel crashes with, ends the server, and would do so at each
start again. So what is begun is noted first. Requests that a process left without an answer and without a word are
answered before all others of any batch, one at a time: then it is known which of them it ends with.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

MOST_ENDS = 3
"""Ends of the process during a request, after which it is not asked again."""

_SUFFIX = ".begun"


class BegunRequests:
    """The requests of a batch that were begun, each as often as it was, in a file of a number a line.

    What is written outlives the end of the process, and not that of the machine: nothing is waited for.

    Args:
        folder: Where it is.
        batch_id: The batch.
    """

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._path = folder / f"{batch_id}{_SUFFIX}"
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            lines = []
        self.left = Counter(int(line) for line in lines if line.isdecimal())
        """How often a process has ended while it answered them, or before an answer was written, by number."""

    def add(self, number: int) -> None:
        """Note that a request is begun. Raises OSError where that cannot be written."""
        with self._path.open("a") as file:
            file.write(f"{number}\n")

    def forget(self) -> None:
        """Remove the file: the batch has ended, or is left in order."""
        self._path.unlink(missing_ok=True)


def left_behind(folder: Path) -> set[str]:
    """The ids of the batches that a process ended with."""
    return {path.stem for path in folder.glob(f"*{_SUFFIX}")}


class Quarantine:
    """Holds back requests while those that a process may have ended with are answered, one at a time.

    Args:
        batches: The ids of the batches that have some.

    Attributes:
        alone: Held while one of them is answered.
    """

    def __init__(self, batches: set[str]) -> None:
        self.alone = asyncio.Lock()
        self._batches = batches
        self._over = asyncio.Event()
        if not batches:
            self._over.set()

    def leave(self, batch_id: str) -> None:
        """A batch has no more of them."""
        self._batches.discard(batch_id)
        if not self._batches:
            self._over.set()

    async def over(self) -> None:
        """Wait until no batch has any."""
        await self._over.wait()
