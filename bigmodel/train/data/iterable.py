"""Iterable datasets: each process's part of a stream.

A dataset with a `shard` method gives each process its own part (`ShardedSource`); of any other, every process reads all
samples and keeps its own (`IterableDatasetShard`). One batch is read ahead, to recognise the last one.
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
from bigmodel.train.data.steps import LoaderStep, PicklableSource
from bigmodel.train.nested import find_batch_size


class TailSample(NamedTuple):
    """A sample of the last round: whether it is not a repeated one, and the number of samples of the round."""

    value: Any
    own: bool
    total_real: int


class CountedBatch:
    """A collated batch of the last round, with its number of rows that are not repeated; unwrapped by `as_step`."""

    def __init__(self, batch: Any, rows: int, real: int, total_real: int) -> None:
        self.batch, self.rows, self.real, self.total_real = batch, rows, real, total_real

    def pin_memory(self, device: Any = None) -> CountedBatch:
        """Pin the batch inside; called by the data loader."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.batch = pin_memory(self.batch, device)
        return self


class CountingCollate:
    """A collate function that counts the samples that are not repeated in batches of the last round."""

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

    Args:
        dataset: the dataset, the same on every process.
        batch_size: samples in one process's batch; with `split_batches`, in the batches of all processes together.
        drop_last: drop an incomplete round.
        num_processes: number of processes.
        process_index: rank of this process.
        split_batches: see `batch_size`.
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
        """Set the epoch of the dataset, if it has one."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, left = divmod(len(self.dataset), self.round)
        if self.drop_last or not left:
            return rounds * self.share
        own = min(max(left - self.process_index * self.share, 0), self.share)
        return rounds * self.share + (self.share if self.even_batches else own)

    def __iter__(self) -> Iterator[Any]:
        return (each.value if isinstance(each, TailSample) else each for each in self.counted())

    def counted(self) -> Iterator[Any]:
        """Yield the samples, those of the last, incomplete, round as `TailSample`."""
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


class CountedDatasetShard(IterableDatasetShard):
    """Yields the samples of the last, incomplete, round as `TailSample`; `CountingCollate` collates them."""

    def __iter__(self) -> Iterator[Any]:
        return self.counted()


END = object()


class IterableSource(PicklableSource):
    """All batches of a loader, in its order."""

    def __init__(self, base: DataLoader[Any]) -> None:
        self.base = base

    @property
    def runs_ahead(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.base)

    def open(self, skip: int) -> Iterator[LoaderStep]:
        batches = islice(iter(self.base), skip, None)
        return self._until_end(batches, next(batches, END))

    def _until_end(self, batches: Iterator[Any], ahead: Any) -> Iterator[LoaderStep]:
        read_state = getattr(self.base, "state_dict", None)
        while ahead is not END:
            state = read_state() if read_state is not None else None
            current, ahead = ahead, next(batches, END)
            yield as_step(current, last=ahead is END)._replace(state=state)


def as_step(batch: Any, last: bool) -> LoaderStep:
    """Return the step of a batch, with the counts of `CountingCollate`."""
    if not isinstance(batch, CountedBatch):
        return LoaderStep(batch, last)
    rows, real = batch.rows, batch.real
    if not rows:  # a batch made by the dataset itself is repeated or not as a whole
        rows = find_batch_size(batch.batch) or 1
        real *= rows
    return LoaderStep(batch.batch, last, True, rows, real, batch.total_real)


_AHEAD = 2


class ShardedSource(PicklableSource):
    """One process's part of a dataset, with as many steps as the longest part of any process.

    Args:
        base: reads this process's part.
        group: a process group for CPU tensors, used only for this.
        length: steps of an epoch; None if unknown.
    """

    def __init__(self, base: DataLoader[Any], group: Any, length: int | None = None) -> None:
        self.base, self._group, self._length = base, group, length

    @property
    def runs_ahead(self) -> bool:
        return True

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this dataset has no length")
        return self._length

    def open(self, skip: int) -> Iterator[LoaderStep]:
        batches = islice(iter(self.base), skip, None)
        queue = deque(self._compare(next(batches, END), first=number == 0) for number in range(_AHEAD))
        return self._synchronized(batches, queue)

    def _compare(self, batch: Any, first: bool = False) -> tuple[Any, torch.Tensor, Any]:
        """Start the all-reduce of this process's state of a round; return the batch, the tensor and the work."""
        has_batch = batch is not END
        rows = find_batch_size(batch) if has_batch else 0
        flags = torch.tensor([has_batch, rows != self.base.batch_size, first and not has_batch], dtype=torch.int32)
        return batch, flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _synchronized(
        self, batches: Iterator[Any], queue: deque[tuple[Any, torch.Tensor, Any]]
    ) -> Iterator[LoaderStep]:
        repeated: Any = END
        while True:
            batch, (any_has_batch, uneven, some_have_none) = _compared(queue[0])
            if not any_has_batch:
                return
            if some_have_none:
                raise TrainError(
                    "some process's part of the dataset has no batch at all; shard the dataset more finely "
                    "or set dispatch_batches=True"
                )
            own = batch is not END
            repeated = batch if own else repeated
            queue.popleft()
            queue.append(self._compare(next(batches, END)))
            last = not _compared(queue[0])[1][0]
            rows = (find_batch_size(repeated) or 1) if uneven else 0
            yield LoaderStep(repeated, last, bool(uneven), rows, rows if own else 0)


def _compared(entry: tuple[Any, torch.Tensor, Any]) -> tuple[Any, list[int]]:
    batch, flags, work = entry
    work.wait()
    return batch, flags.tolist()
