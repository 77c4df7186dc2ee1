"""One process's samples of an iterable dataset that cannot be sharded: every process reads all and keeps its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset


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
