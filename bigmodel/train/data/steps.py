"""What a data loader knows of each batch, and where batches of a map-style dataset come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader

from bigmodel.train.data.batch_shard import BatchSamplerShard
from bigmodel.train.data.batch_stream import BatchStream
from bigmodel.train.operations.nested import find_batch_size


class Step(NamedTuple):
    """One batch of one process.

    Attributes:
        batch: what the training loop gets.
        last: whether no batch follows.
        uneven: whether any process has repeated samples, or another number of samples than the others.
        rows, real: samples in this batch, and how many of them are this process's own. Read where `uneven`.
        total_real: own samples of all processes; -1 where no process knows.
        state: the state of a stateful loader after this batch, or None.
    """

    batch: Any
    last: bool
    uneven: bool = False
    rows: int = 0
    real: int = 0
    total_real: int = -1
    state: Any = None


class Source(Protocol):
    """Where a prepared data loader takes its batches from."""

    base: DataLoader[Any]

    @property
    def runs_ahead(self) -> bool:
        """Whether reading one batch ahead leaves the random draws of this process where they were."""
        ...

    def open(self, skip: int) -> Iterator[Step]:
        """Begin a pass without its first `skip` batches. Draws the order before it returns."""
        ...

    def __len__(self) -> int: ...


class MapSource:
    """A map-style dataset read through a `BatchSamplerShard`.

    The end is known from the indices, so without workers no batch is fetched before the loop asks for it: random
    transforms draw exactly when they would in a loop without this library.
    """

    def __init__(self, base: DataLoader[Any], shard: BatchSamplerShard) -> None:
        self.base, self.shard = base, shard

    @property
    def runs_ahead(self) -> bool:
        return self.base.num_workers > 0

    def __len__(self) -> int:
        return len(self.shard)

    def open(self, skip: int) -> Iterator[Step]:
        self.shard.skip = skip
        try:
            iterator = iter(self.base)
            stream = self.shard.latest
            assert stream is not None
            stream.start()
        finally:
            self.shard.skip = 0
        return _with_notes(iterator, stream)


def _with_notes(batches: Iterator[Any], stream: BatchStream) -> Iterator[Step]:
    for given, batch in enumerate(batches, 1):
        _, rows, real, uneven, total_real = stream.notes.popleft()
        last = stream.exhausted and given == stream.produced
        yield Step(batch, last, uneven, rows, real, total_real)


def real_rows(step: Step, length: int) -> int:
    """Return how many of `length` rows computed from this step's batch belong to own samples.

    Lengths that are a multiple of the batch's rows (several outputs for each sample) are cut in proportion; others
    have nothing to do with the samples and are kept.
    """
    rows = step.rows or find_batch_size(step.batch) or 0
    if not step.uneven or rows == step.real or rows == 0 or length % rows:
        return length
    return length // rows * step.real
