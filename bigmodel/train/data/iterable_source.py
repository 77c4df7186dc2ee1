"""Batches of an iterable dataset. One batch is read ahead, so that the last one is known as such."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from bigmodel.train.data.iterable_shard import CountedBatch
from bigmodel.train.data.steps import Step
from bigmodel.train.operations.nested import find_batch_size

END = object()


class IterableSource:
    """Whatever the loader gives, until it gives no more."""

    def __init__(self, base: DataLoader[Any]) -> None:
        self.base = base

    @property
    def runs_ahead(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.base)

    def open(self, skip: int) -> Iterator[Step]:
        batches = islice(iter(self.base), skip, None)
        return self._until_end(batches, next(batches, END))

    def _until_end(self, batches: Iterator[Any], ahead: Any) -> Iterator[Step]:
        read_state = getattr(self.base, "state_dict", None)
        while ahead is not END:
            state = read_state() if read_state is not None else None
            current, ahead = ahead, next(batches, END)
            yield as_step(current, last=ahead is END)._replace(state=state)


def as_step(batch: Any, last: bool) -> Step:
    """Return the step of a batch; what `CountingCollate` counted is taken off it."""
    if not isinstance(batch, CountedBatch):
        return Step(batch, last)
    rows, real = batch.rows, batch.real
    if not rows:  # a batch made by the dataset itself is own or not as a whole
        rows = find_batch_size(batch.batch) or 1
        real *= rows
    return Step(batch.batch, last, True, rows, real, batch.total_real)
