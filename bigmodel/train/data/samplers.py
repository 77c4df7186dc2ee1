"""Samplers that shuffle equally on every process, and one that skips batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler

from bigmodel.train.state.partial import PartialState


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order in epoch e depends on `initial_seed + e` alone.

    A pass that ends advances the epoch; a pass that the caller leaves early is repeated by the next one.

    Args:
        data_source: the dataset.
        data_seed: the seed of epoch 0; None: that of the global generator.
        kwargs: those of `torch.utils.data.RandomSampler`.
    """

    def __init__(self, data_source: Any, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(data_source, *args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed((self.initial_seed + self.epoch) % 2**63)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch


class SharedOrder:
    """Gives a `RandomSampler` the same order on all processes: the one that process 0 would have drawn.

    A `RandomSampler` without a generator seeds one from the global generator at the start of each pass. This class
    draws the same number at the same time on every process, and uses process 0's, so that one process and several
    shuffle equally.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        self._sampler = sampler

    def __call__(self) -> None:
        seed = torch.empty((), dtype=torch.int64).random_()
        self._sampler.generator = torch.Generator().manual_seed(int(shared_number(int(seed))))


def shared_number(number: int) -> int:
    """Return process 0's `number` on every process."""
    state = PartialState()
    if not state.use_distributed:
        return number
    cell = torch.tensor([number], dtype=torch.int64, device=state.device)
    dist.broadcast(cell, src=0)
    return int(cell.item())


class SkipBatchSampler:
    """A batch sampler without the first `skip_batches` batches of another, whose attributes it has."""

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)  # type: ignore[arg-type]
