"""Iterable datasets: each process's part of a stream.

A dataset that can be sharded gives each process a part of its own (`ShardedSource`); of any other, every process reads
all samples and keeps its own (`IterableDatasetShard`). One batch is read ahead, so that the last one is known as such.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from bigmodel.errors import TrainError
from bigmodel.train.data.steps import Step
from bigmodel.train.nested import find_batch_size


class TailSample(NamedTuple):
    """A sample of the last round: whether it is this process's own, and how many samples the round has in all."""

    value: Any
    own: bool
    total_real: int


class CountedBatch:
    """A collated batch of the last round and how many of its rows are own; unwrapped before the loop sees it."""

    def __init__(self, batch: Any, rows: int, real: int, total_real: int) -> None:
        self.batch, self.rows, self.real, self.total_real = batch, rows, real, total_real

    def pin_memory(self, device: Any = None) -> CountedBatch:
        """Pin the batch inside; called by the data loader."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.batch = pin_memory(self.batch, device)
        return self


class CountingCollate:
    """A collate function that counts own samples in batches of the last round."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, TailSample):  # no automatic batching: the sample is a batch
            return CountedBatch(self.collate(samples.value), 0, int(samples.own), samples.total_real)
        if not samples or not isinstance(samples[0], TailSample):
            return self.collate(samples)
        real = sum(sample.own for sample in samples)
        batch = self.collate([sample.value for sample in samples])
        return CountedBatch(batch, len(samples), real, samples[0].total_real)


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process: of every round of `num_processes` batches, its own batch.

    Samples of the last, incomplete, round are given as `TailSample`; use `CountingCollate` to collate them.

    Args:
        dataset: the dataset, the same on every process.
        batch_size: samples in one process's batch, or in all processes' batches together with `split_batches`.
        drop_last: leave out an incomplete round.
        even_batches: fill an incomplete round with samples of the first one.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.dataset = dataset
        self.drop_last, self.even_batches = drop_last, even_batches
        self.process_index = process_index
        self.share = batch_size // num_processes if split_batches else batch_size
        self.round = self.share * num_processes

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch begins."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, left = divmod(len(self.dataset), self.round)
        if self.drop_last or not left:
            return rounds * self.share
        own = min(max(left - self.process_index * self.share, 0), self.share)
        return rounds * self.share + (self.share if self.even_batches else own)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        start = self.process_index * self.share
        first: list[Any] = []
        while group := list(islice(samples, self.round)):
            first = first or group
            if len(group) == self.round:
                yield from group[start : start + self.share]
            elif not self.drop_last:
                yield from self._tail(group, first)

    def _tail(self, group: list[Any], first: list[Any]) -> Iterator[TailSample]:
        total, start = len(group), self.process_index * self.share
        if self.even_batches:
            group = [*group, *islice(cycle(first), self.round - total)]
        for position, value in enumerate(group[start : start + self.share], start):
            yield TailSample(value, position < total, total)


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


_AHEAD = 2


class ShardedSource:
    """One process's part of a dataset, kept in step with the others' parts.

    Args:
        base: reads this process's part.
        group: a process group for CPU tensors, used by nothing else.
        length: steps of an epoch, where every process knows it.
    """

    def __init__(self, base: DataLoader[Any], group: Any, length: int | None = None) -> None:
        self.base, self._group, self._length = base, group, length

    @property
    def runs_ahead(self) -> bool:
        return True

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this dataset does not say how many samples it has")
        return self._length

    def open(self, skip: int) -> Iterator[Step]:
        batches = islice(iter(self.base), skip, None)
        queue = deque(self._announce(next(batches, END), first=number == 0) for number in range(_AHEAD))
        return self._in_step(batches, queue)

    def _announce(self, batch: Any, first: bool = False) -> tuple[Any, torch.Tensor, Any]:
        """Begin to tell the others whether there is a batch; return it with the answer to come."""
        there = batch is not END
        rows = find_batch_size(batch) if there else 0
        answer = torch.tensor([there, rows != self.base.batch_size, first and not there], dtype=torch.int32)
        return batch, answer, dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _in_step(self, batches: Iterator[Any], queue: deque[tuple[Any, torch.Tensor, Any]]) -> Iterator[Step]:
        repeated: Any = END
        while True:
            batch, (any_there, uneven, some_have_none) = _answered(queue[0])
            if not any_there:
                return
            if some_have_none:
                raise TrainError(
                    "some process's part of the dataset has no batch at all; shard the dataset more finely "
                    "or set dispatch_batches=True"
                )
            own = batch is not END
            repeated = batch if own else repeated
            queue.popleft()
            queue.append(self._announce(next(batches, END)))
            last = not _answered(queue[0])[1][0]
            rows = (find_batch_size(repeated) or 1) if uneven else 0
            yield Step(repeated, last, bool(uneven), rows, rows if own else 0)


def _answered(entry: tuple[Any, torch.Tensor, Any]) -> tuple[Any, list[int]]:
    batch, answer, work = entry
    work.wait()
    return batch, answer.tolist()
