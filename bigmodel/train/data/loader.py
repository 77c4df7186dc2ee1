"""The data loader that `prepare` returns, its progress, and resuming an interrupted pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from bigmodel.devices import is_accelerator
from bigmodel.train.data.steps import Source, Step, move_ahead, move_each, real_rows
from bigmodel.train.seeding import host_state, set_host_state, synchronize_rng_states
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.types import RNGType


class Progress:
    """Shared by a prepared data loader and those made of it by `skip_first_batches`.

    Attributes:
        epoch: passes completed (or as set by `set_epoch`).
        batches: batches given in the current pass, the skipped ones included.
        loader_state: what a stateful loader said after the last batch given.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._generators = generators
        self.epoch = 0
        self.batches = 0
        self.loader_state: Any = None
        self._running = False
        self._order: dict[str, Any] | None = None
        self._replay: dict[str, Any] | None = None

    @contextmanager
    def begin(self, skip: int) -> Iterator[None]:
        """Begin a pass; its order is drawn in the body.

        After `load_state_dict` the generators are set, for the body, as they were when the interrupted pass drew its
        order. A pass that had been given up is only taken up again by skipping into it.
        """
        replay, self._replay = self._replay, None
        now = self._draws()
        self._order = now
        if replay is not None and (replay["running"] or skip):
            self._order = replay["order"]
            set_host_state(self._order["host"])
            for generator, state in zip(self._generators, self._order["generators"], strict=False):
                generator.set_state(state)
        try:
            yield
        finally:
            if self._order is not now:
                set_host_state(now["host"])
        self.batches = skip

    def _draws(self) -> dict[str, Any]:
        return {"host": host_state(), "generators": [generator.get_state() for generator in self._generators]}

    @property
    def resumable(self) -> bool:
        """Whether a loaded state waits to be taken up by the next pass."""
        return self._replay is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The time from the first batch of a pass to its end, or to the loop being left."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def finish(self) -> None:
        """The pass gave its last batch and the loop came back for another."""
        self.epoch += 1
        self.batches = 0
        self._order = self.loader_state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as numbers and tensors."""
        generators = [generator.get_state() for generator in self._generators]
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "running": self._running,
            "order": self._order,
            "generators": generators,
            "loader_state": self.loader_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; the next pass may continue the interrupted one."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        self.loader_state = state["loader_state"]
        self._order = None
        self._replay = state if state["order"] is not None else None
        for generator, generator_state in zip(self._generators, state["generators"], strict=False):
            generator.set_state(generator_state)


class DataLoaderShard(DataLoader[Any]):
    """This process's batches, on its device.

    A `DataLoader` by type; what it has not itself it takes from `base_dataloader`.

    Args:
        source: where batches come from.
        device: where they go; None leaves them.
        rng_types: generators to synchronise at the start of each pass.
        generator: the one meant by "generator".
        skip: batches left out at the start of each pass.
        progress: shared with the loader this one skips in.

    Attributes:
        end_of_dataloader: whether the batch being worked on is the last.
        remainder: real samples of all processes in an uneven last round, else -1.
    """

    def __init__(
        self,
        source: Source,
        device: torch.device | None = None,
        rng_types: Sequence[RNGType | str] = (),
        generator: torch.Generator | None = None,
        non_blocking: bool = False,
        resumes_by_itself: bool = False,
        batch_size: int | None = None,
        total_batch_size: int | None = None,
        skip: int = 0,
        progress: Progress | None = None,
    ) -> None:
        # DataLoader.__init__ is not run: this is one by type, and delegates to the one inside.
        self.base_dataloader = source.base
        self.gradient_state = GradientState()
        self.device, self.end_of_dataloader, self.remainder = device, False, -1
        self.source, self._non_blocking = source, non_blocking
        self._resumes_by_itself = resumes_by_itself
        self.rng_types, self.synchronized_generator = tuple(rng_types), generator
        self.__dict__["batch_size"] = batch_size
        self.total_batch_size, self.skip_batches = total_batch_size, skip
        self._progress = progress or Progress(_generators(source.base))
        self._step = Step(None, False)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return max(len(self.source) - self.skip_batches, 0)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole dataset."""
        dataset: Any = self.base_dataloader.dataset
        return len(getattr(dataset, "total_dataset", dataset))

    @property
    def iteration(self) -> int:
        """The number of the current pass over the data."""
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is; samplers and datasets with `set_epoch` are told."""
        self._progress.epoch = epoch
        self._tell_epoch(epoch)

    def _tell_epoch(self, epoch: int) -> None:
        batch_sampler = self.base_dataloader.batch_sampler
        dealt = getattr(batch_sampler, "batch_sampler", batch_sampler)
        listeners: tuple[Any, ...] = (
            dealt,
            getattr(dealt, "sampler", self.base_dataloader.sampler),
            self.base_dataloader.dataset,
        )
        for listener in listeners:
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._run(self._begin())

    def _begin(self) -> Iterator[Step]:
        synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self._tell_epoch(self._progress.epoch)
        skip = self.skip_batches
        resumed = 0
        if self._resumes_by_itself and self._progress.batches:
            resumed = self._resume()
        with self._progress.begin(skip + resumed):
            steps = self.source.open(skip if self._progress.loader_state is not None else skip + resumed)
        return self._moved(steps)

    def _resume(self) -> int:
        """Return the batches to skip after `load_state_dict`; hand a stateful loader its own state."""
        progress = self._progress
        given = progress.batches if progress.resumable else 0
        if given and progress.loader_state is not None:
            self.base_dataloader.load_state_dict(progress.loader_state)  # type: ignore[attr-defined]
        return given

    def _moved(self, steps: Iterator[Step]) -> Iterator[Step]:
        device = self.device
        if device is None or device.type == "cpu":
            return steps
        if self.source.runs_ahead and is_accelerator(device) and device.type != "mps":
            return move_ahead(steps, device)
        return move_each(steps, device, self._non_blocking)

    def _run(self, steps: Iterator[Step]) -> Iterator[Any]:
        progress, state = self._progress, self.gradient_state
        state._add_dataloader(self)
        try:
            with progress.running():
                for step in steps:
                    self._step, self.end_of_dataloader = step, step.last
                    self.remainder = step.total_real if step.uneven else -1
                    progress.batches += 1
                    progress.loader_state = step.state
                    yield step.batch
            progress.finish()
        finally:
            state._remove_dataloader(self)
            self.end_of_dataloader, self._step = False, Step(None, False)

    @property
    def is_uneven(self) -> bool:
        """Whether some process's current batch has repeated samples, or another length than the others'."""
        return self._step.uneven

    def count_real(self, length: int) -> int:
        """Return how many of `length` rows computed from the current batch belong to this process's own samples."""
        return real_rows(self._step, length)

    @property
    def has_real(self) -> bool:
        """Whether the current batch has any sample of this process's own."""
        return not self._step.uneven or self._step.real > 0

    def skipping(self, batches: int) -> DataLoaderShard:
        """Return a loader like this one whose passes leave out the first `batches` batches."""
        skipping = object.__new__(type(self))
        skipping.__dict__.update(self.__dict__)
        skipping.skip_batches = self.skip_batches + batches
        return skipping

    def state_dict(self) -> dict[str, Any]:
        """Return how far this loader has come."""
        return self._progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave.

        A stateful loader goes on by itself; another repeats the order of the interrupted pass, in which
        `skip_first_batches` finds the place.
        """
        self._progress.load_state_dict(state_dict)


class DataLoaderDispatcher(DataLoaderShard):
    """A prepared data loader whose batches process 0 reads for all."""


def _generators(base: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that the user gave the loader or its sampler."""
    batch_sampler = base.batch_sampler
    dealt = getattr(batch_sampler, "batch_sampler", batch_sampler)
    sampler = getattr(dealt, "sampler", base.sampler)
    found = [getattr(sampler, "generator", None), base.generator]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
