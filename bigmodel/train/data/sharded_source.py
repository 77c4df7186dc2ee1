"""Batches of an iterable dataset of which each process reads only its part.

The parts may end at different steps. Before each step the processes tell each other whether they have a batch, two
steps ahead and beside the compute, and one that has none repeats its last batch, with no sample counted as its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bigmodel.errors import TrainError
from bigmodel.train.data.iterable_source import END
from bigmodel.train.data.steps import Step
from bigmodel.train.operations.nested import find_batch_size

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
