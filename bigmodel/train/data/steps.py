"""Steps of a data loader: a batch with its counts; and copying of batches to the device, one ahead of the compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from bigmodel.devices import copy_stream
from bigmodel.devices.nested import iter_tensors
from bigmodel.devices.streams import current_stream, has_streams
from bigmodel.train.nested import find_batch_size, send_to_device
from bigmodel.train.state.partial import PartialState


class LoaderStep(NamedTuple):
    """One batch of one process.

    Attributes:
        batch: the batch for the training loop.
        last: whether it is the last batch.
        uneven: whether any process has repeated samples or another number of samples.
        rows, real: samples in this batch, and how many of them are not repeated. Used only if `uneven`.
        total_real: samples of all processes that are not repeated; -1 if unknown.
        state: the state of a stateful loader after this batch, or None.
    """

    batch: Any
    last: bool
    uneven: bool = False
    rows: int = 0
    real: int = 0
    total_real: int = -1
    state: Any = None


class StepSource(Protocol):
    """The source of a prepared data loader's batches."""

    base: DataLoader[Any]

    @property
    def runs_ahead(self) -> bool:
        """Whether reading one batch ahead does not change the order of this process's random draws."""
        ...

    def open(self, skip: int) -> Iterator[LoaderStep]:
        """Start a pass that skips its first `skip` batches. The order is drawn before this returns."""
        ...

    def __len__(self) -> int: ...


class PicklableSource:
    """Pickles without the iterators and the process group of a pass; the copy begins a pass of its own.

    The copy uses the data loaders' process group of the process that unpickles it.
    """

    base: DataLoader[Any]

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_group"}
        if getattr(self.base, "_iterator", None) is not None:  # kept by loaders with state or persistent workers
            state["base"] = copy.copy(self.base)
            state["base"]._iterator = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _group=PartialState._shared_state.get("data_group"))


def real_rows(step: LoaderStep, length: int) -> int:
    """Return how many of `length` rows computed from this step's batch are not of repeated samples.

    A length that is a multiple of the batch's rows (several outputs per sample) is reduced in proportion; any other is
    unrelated to the samples and returned unchanged.
    """
    rows = step.rows or find_batch_size(step.batch) or 0
    if not step.uneven or rows == step.real or rows == 0 or length % rows:
        return length
    return length // rows * step.real


def move_each(steps: Iterator[LoaderStep], device: torch.device, non_blocking: bool) -> Iterator[LoaderStep]:
    """Yield the steps with their batches on `device`, each copied when it is requested."""
    for step in steps:
        yield step._replace(batch=send_to_device(step.batch, device, non_blocking=non_blocking))


def move_ahead(steps: Iterator[LoaderStep], device: torch.device) -> Iterator[LoaderStep]:
    """Yield the steps with their batches on `device`; the next one is copied concurrently with the compute."""
    stream = copy_stream(device)

    def begin(step: LoaderStep) -> tuple[list[LoaderStep], Any]:
        moved: list[LoaderStep] = []
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
    """Record for the allocator that the compute stream uses tensors allocated on the copy stream."""
    if has_streams(device):
        current = current_stream(device)
        for tensor in iter_tensors(batch):
            if tensor.device.type == device.type:
                tensor.record_stream(current)
