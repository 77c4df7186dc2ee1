"""A batch together with what is known of it, and copying batches to the device, one ahead of the compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from bigmodel.devices import copy_stream
from bigmodel.devices.nested import iter_tensors
from bigmodel.train.nested import find_batch_size, send_to_device


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


def real_rows(step: Step, length: int) -> int:
    """Return how many of `length` rows computed from this step's batch belong to own samples.

    Lengths that are a multiple of the batch's rows (several outputs for each sample) are cut in proportion; others
    have nothing to do with the samples and are kept.
    """
    rows = step.rows or find_batch_size(step.batch) or 0
    if not step.uneven or rows == step.real or rows == 0 or length % rows:
        return length
    return length // rows * step.real


def move_each(steps: Iterator[Step], device: torch.device, non_blocking: bool) -> Iterator[Step]:
    """Yield the steps with their batches on `device`, each copied when it is asked for."""
    for step in steps:
        yield step._replace(batch=send_to_device(step.batch, device, non_blocking=non_blocking))


def move_ahead(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """Yield the steps with their batches on `device`; the next one is being copied beside the compute."""
    stream = copy_stream(device)

    def begin(step: Step) -> tuple[list[Step], Any]:
        moved: list[Step] = []
        event = stream.submit(
            lambda: moved.append(step._replace(batch=send_to_device(step.batch, device, non_blocking=True)))
        )
        return moved, event

    following = next(steps, None)
    pending = begin(following) if following is not None else None
    try:
        while pending is not None:
            current, following = pending, next(steps, None)
            pending = begin(following) if following is not None else None
            moved, event = current
            event.wait()
            _keep_until_used(moved[0].batch, device)
            yield moved[0]
    finally:
        if pending is not None:
            pending[1].synchronize()


def _keep_until_used(batch: Any, device: torch.device) -> None:
    """Tell the allocator that the compute stream uses what was allocated on the copy stream."""
    if device.type in ("cuda", "xpu"):
        current = torch.get_device_module(device.type).current_stream(device)
        for tensor in iter_tensors(batch):
            if tensor.device.type == device.type:
                tensor.record_stream(current)
