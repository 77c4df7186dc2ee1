"""Map-style datasets: the batches of sample indices of each process, and how many of their samples are real.

Batches are distributed in rounds: of W processes, process r reads batches r, W + r, 2W + r, ..., so that the processes'
batches, concatenated, have the sampler's order. An incomplete last round is filled with samples of the first round; the
number of real samples in each batch is recorded, so that metrics count every sample once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from bigmodel.errors import TrainError
from bigmodel.train.data.steps import LoaderStep, PicklableSource


class IndexBatch(NamedTuple):
    """One process's batch.

    Attributes:
        indices: indices for the data loader to fetch; the first `real` of them are not repeated.
        rows, real: number of indices, and how many of them are not repeated.
        uneven: whether any process's batch of this round has repeated samples or another length.
        total_real: real samples of all processes in this round.
    """

    indices: Any
    rows: int
    real: int
    uneven: bool
    total_real: int


class BatchStream:
    """One pass over a process's batches. Reads one batch of indices ahead, to recognise the last one."""

    def __init__(self, batches: Iterator[IndexBatch], skip: int, on_start: Callable[[], None] | None) -> None:
        self._batches = batches
        self._skip = skip
        self._on_start = on_start
        self._ahead: IndexBatch | None = None
        self._started = False
        self.pending: deque[IndexBatch] = deque()
        self.produced = 0

    def start(self) -> None:
        """Draw the order of this pass, unless that was done."""
        if self._started:
            return
        self._started = True
        if self._on_start is not None:
            self._on_start()
        self._ahead = next(islice(self._batches, self._skip, None), None)

    @property
    def exhausted(self) -> bool:
        """Whether all batches have been produced."""
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
        self.pending.append(current._replace(indices=None))
        return current.indices


class BatchSource(Protocol):
    """A batch sampler: an iterable of batches of indices."""

    def __iter__(self) -> Iterator[Any]: ...


class BatchSamplerShard:
    """A batch sampler of one process's share of another batch sampler's batches.

    Args:
        batch_sampler: yields lists of indices (or any objects, which are not split, if it has no `batch_size`).
        num_processes: number of processes that share the batches.
        process_index: index of this process.
        split_batches: split every batch into `num_processes` parts, instead of distributing whole batches.
        even_batches: fill the last round so that all processes have equally many batches and samples.
        on_start: called just before a pass draws its order.

    Raises:
        TrainError: `split_batches` with a batch size that does not divide by `num_processes`.
    """

    def __init__(
        self,
        batch_sampler: BatchSource,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.whole_batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))
        self.on_start = on_start
        self.skip = 0
        self.latest: BatchStream | None = None
        if split_batches and num_processes > 1:
            if self.whole_batch_size is None:
                raise TrainError("split_batches needs a batch sampler with a batch_size")
            if self.whole_batch_size % num_processes:
                raise TrainError(
                    f"split_batches: a batch of {self.whole_batch_size} does not divide among {num_processes} processes"
                    ": it must be a round multiple of them"
                )

    @property
    def batch_size(self) -> int | None:
        """Samples in one process's batch; None if batches vary."""
        if self.split_batches and self.whole_batch_size is not None:
            return self.whole_batch_size // self.num_processes
        return self.whole_batch_size

    @property
    def total_length(self) -> int:
        """Batches of all processes together."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        total = self.total_length
        if self.num_processes == 1 or self.split_batches:
            return total if self.num_processes == 1 else total - self._process_misses_last()
        rounds, left = divmod(total, self.num_processes)
        if not left or self.drop_last:
            return rounds
        return rounds + (self.even_batches or self.process_index < left)

    def _process_misses_last(self) -> int:
        """Return 1 if the last, short, batch has no sample for this process and is not filled; else 0."""
        sampler = getattr(self.batch_sampler, "sampler", None)
        if self.even_batches or self.drop_last or not isinstance(sampler, Sized) or not self.whole_batch_size:
            return 0
        last = len(sampler) % self.whole_batch_size
        return int(0 < last <= self.process_index * (self.whole_batch_size // self.num_processes))

    def __iter__(self) -> BatchStream:
        self.latest = BatchStream(self._batches(), self.skip, self.on_start)
        return self.latest

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "latest": None}  # the pass of a copy is its own

    def _batches(self) -> Iterator[IndexBatch]:
        if self.num_processes == 1:
            return (_whole(batch) for batch in iter(self.batch_sampler))
        return self._split() if self.split_batches else self._distribute()

    def _split(self) -> Iterator[IndexBatch]:
        whole, size = self.whole_batch_size or 0, self.batch_size or 0
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or list(batch)
            total = len(batch)
            start = self.process_index * size
            real = min(max(total - start, 0), size)
            if total < whole and self.even_batches:
                batch = [*batch, *islice(cycle(first), whole - total)]
            part = batch[start : start + size]
            if part:
                yield IndexBatch(part, len(part), real, total < whole, total)

    def _distribute(self) -> Iterator[IndexBatch]:
        first: list[Any] = []
        for group, is_last in _rounds(iter(self.batch_sampler), self.num_processes):
            first = first or group
            if is_last:
                yield from self._last_round(group, first)
            else:
                lengths = [_length(batch) for batch in group]
                mine = lengths[self.process_index]
                yield IndexBatch(group[self.process_index], mine, mine, len(set(lengths)) > 1, sum(lengths))

    def _last_round(self, group: list[Any], first: list[Any]) -> Iterator[IndexBatch]:
        there, wanted = len(group), self.num_processes
        if there < wanted and self.drop_last:
            return
        lengths = [_length(batch) for batch in group] + [0] * (wanted - there)
        size = self.whole_batch_size
        uneven = there < wanted or len({*lengths, size or lengths[0]}) > 1
        real, total = lengths[self.process_index], sum(lengths)
        mine = group[self.process_index] if self.process_index < there else None
        if uneven and self.even_batches:
            mine = self._filled(mine, there, lengths, first)
        if mine is not None:
            yield IndexBatch(mine, _length(mine), real, uneven, total)

    def _filled(self, mine: Any, there: int, lengths: list[int], first: list[Any]) -> Any:
        size = self.whole_batch_size
        if size is None:  # batches vary in size: whole ones of the first round are repeated, in its order
            return mine if mine is not None else first[(self.process_index - there) % len(first)]
        missing_before = sum(max(size - length, 0) for length in lengths[: self.process_index])
        missing = size - lengths[self.process_index]
        filler = [index for batch in first for index in batch]
        return [*(mine or []), *islice(cycle(filler), missing_before, missing_before + max(missing, 0))]


def _rounds(batches: Iterator[Any], size: int) -> Iterator[tuple[list[Any], bool]]:
    """Yield (list of `size` batches, False) ... (list of 1 to `size` batches, True)."""
    group = list(islice(batches, size))
    while group:
        following = list(islice(batches, size))
        yield group, not following
        group = following


def _length(batch: Any) -> int:
    return len(batch) if isinstance(batch, Sized) else 1


def _whole(batch: Any) -> IndexBatch:
    rows = _length(batch)
    return IndexBatch(batch, rows, rows, False, rows)


class MapSource(PicklableSource):
    """A map-style dataset read through a `BatchSamplerShard`.

    The end is known from the indices, so without workers no batch is fetched before the loop requests it: random
    transforms draw in the same order as in a loop without this library.
    """

    def __init__(self, base: DataLoader[Any], shard: BatchSamplerShard) -> None:
        self.base, self.shard = base, shard

    @property
    def runs_ahead(self) -> bool:
        return self.base.num_workers > 0

    def __len__(self) -> int:
        return len(self.shard)

    def open(self, skip: int) -> Iterator[LoaderStep]:
        self.shard.skip = skip
        try:
            iterator = iter(self.base)
            stream = self.shard.latest
            assert stream is not None
            stream.start()
        finally:
            self.shard.skip = 0
        return _loader_steps(iterator, stream)


def _loader_steps(batches: Iterator[Any], stream: BatchStream) -> Iterator[LoaderStep]:
    for number, batch in enumerate(batches, 1):
        _, rows, real, uneven, total_real = stream.pending.popleft()
        last = stream.exhausted and number == stream.produced
        yield LoaderStep(batch, last, uneven, rows, real, total_real)
