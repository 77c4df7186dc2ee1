"""Batches of a stream: the last is known as such, and each comes with what the loader said after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.train.data.iterable_shard import CountedBatch
from bigmodel.train.data.iterable_source import IterableSource, as_step


class Numbers(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


class Stateful(DataLoader[Any]):
    """Knows how many batches it has given."""

    given = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}


def test_the_last_batch_is_known_as_such() -> None:
    source = IterableSource(DataLoader(Numbers(5), batch_size=2))
    assert [(step.batch.tolist(), step.last) for step in source.open(1)] == [([2, 3], False), ([4], True)]
    assert list(source.open(3)) == []
    assert (len(source), source.runs_ahead) == (3, True)


def test_the_state_after_a_batch_is_that_before_the_next_is_read() -> None:
    source = IterableSource(Stateful(Numbers(3), batch_size=1))
    assert [step.state["given"] for step in source.open(0)] == [1, 2, 3]


def test_counted_batches_are_taken_out_of_their_wrapper() -> None:
    batch = torch.arange(4)
    step = as_step(CountedBatch(batch, 4, 3, 7), last=True)
    assert step.batch is batch
    assert (step.uneven, step.rows, step.real, step.total_real) == (True, 4, 3, 7)
    whole = as_step(CountedBatch(batch, 0, 1, -1), last=False)
    assert (whole.rows, whole.real) == (4, 4)
    assert as_step(batch, last=False).batch is batch
