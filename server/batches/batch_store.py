"""The batches of a folder, each a record that is written anew at each step of its life."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bigmodel.server.batches.folder import read_records, remove_record, write_record
from bigmodel.server.batches.limits import BatchLimits, TooManyBatchesError
from bigmodel.server.batches.records import Batch


class BatchStore:
    """The batches of a folder. What is in memory may be ahead of the folder: its counts of answers are.

    Batches are changed in the event loop alone, and may be read and written to the folder in any thread.

    Args:
        folder: Where they are.
        limits: Their bounds.
    """

    def __init__(self, folder: Path, limits: BatchLimits) -> None:
        self._folder = folder
        self._limits = limits
        self._batches = {batch.id: batch for batch in read_records(folder, Batch)}

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._folder

    def __getitem__(self, batch_id: str) -> Batch:
        return self._batches[batch_id]

    def get(self, owner: str, batch_id: str) -> Batch | None:
        """The batch of this id, if this owner has one."""
        found = self._batches.get(batch_id)
        return found if found is not None and found.owner == owner else None

    def of(self, owner: str) -> list[Batch]:
        """The batches of an owner, the oldest first."""
        return [batch for batch in list(self._batches.values()) if batch.owner == owner]

    def unfinished(self) -> list[Batch]:
        """The batches that have not ended, the oldest first."""
        return [batch for batch in list(self._batches.values()) if not batch.ended]

    def uses(self, file_id: str) -> bool:
        """Whether an unfinished batch needs a file."""
        return any(batch.input_file_id == file_id for batch in self.unfinished())

    def add(self, batch: Batch) -> list[str]:
        """Add a new batch; returns the ids of those that were forgotten for it.

        Raises:
            TooManyBatchesError: Too many have not ended.
        """
        if len(self.unfinished()) >= self._limits.unfinished:
            raise TooManyBatchesError(f"{self._limits.unfinished} batches have not ended; wait for one of them")
        forgotten = self._oldest_ended() if len(self._batches) >= self._limits.batches else []
        for old in forgotten:
            del self._batches[old]
        self._batches[batch.id] = batch
        return forgotten

    def put(self, batch: Batch) -> None:
        """Replace a batch in memory."""
        self._batches[batch.id] = batch

    def drop(self, batch_id: str) -> None:
        """Remove a batch from memory."""
        self._batches.pop(batch_id, None)

    def save(self, batch: Batch) -> None:
        """Write a batch to the folder."""
        write_record(self._folder, batch)

    def forget(self, batch_id: str) -> None:
        """Remove a batch from the folder."""
        remove_record(self._folder, batch_id)

    def _oldest_ended(self) -> list[str]:
        """The id of the oldest batch that has ended, of the owner who has the most of these."""
        ended = [batch for batch in self._batches.values() if batch.ended]
        counts = Counter(batch.owner for batch in ended)
        return [batch.id for batch in ended if counts[batch.owner] == max(counts.values())][:1]
