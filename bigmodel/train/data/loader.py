"""The data loader that `prepare` returns, its progress, and resuming of an interrupted pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from bigmodel.devices import is_accelerator
from bigmodel.errors import TrainError
from bigmodel.train.data.adapter import get_sampler
from bigmodel.train.data.iterable import IterableSource
from bigmodel.train.data.request import stateful_loader_class
from bigmodel.train.data.steps import LoaderStep, StepSource, move_ahead, move_each, real_rows
from bigmodel.train.nested import find_batch_size
from bigmodel.train.seeding import host_state, set_host_state, synchronize_rng_states
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.types import RNGType


class LoaderProgress:
    """The progress of a prepared data loader, shared with those that `skip_first_batches` makes of it.

    Attributes:
        epoch: completed passes (or as set by `set_epoch`).
        batches: batches yielded in the current pass, including skipped ones.
        complete: whether the last batch of the current pass was yielded.
        loader_state: state of a stateful loader after the last batch.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._generators = generators
        self.epoch = 0
        self.batches = 0
        self.complete = False
        self.loader_state: Any = None
        self._running = False
        self._order: dict[str, Any] | None = None
        self._replay: dict[str, Any] | None = None

    @contextmanager
    def begin(self, skip: int) -> Iterator[None]:
        """Begin a pass; its order is drawn in the body.

        After `load_state_dict` the generators have, in the body, the states in which the interrupted pass drew its
        order. A pass that was abandoned is resumed only if batches are skipped.
        """
        replay, self._replay = self._replay, None
        now = self._generator_states()
        self._order = now
        if replay is not None and replay["order"] is not None and (replay["running"] or skip):
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

    def _generator_states(self) -> dict[str, Any]:
        return {"host": host_state(), "generators": [generator.get_state() for generator in self._generators]}

    @property
    def resumable(self) -> bool:
        """Whether the next pass will resume from a loaded state."""
        return self._replay is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark a pass as running within this context: until its end, or until the loop is left."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def finish(self) -> None:
        """Record the end of a complete pass."""
        self.epoch += 1
        self.batches, self.complete = 0, False
        self._order = self.loader_state = None

    def finish_loaded(self) -> bool:
        """After a state was loaded that was saved at the last batch of a pass, finish that pass. Return whether so."""
        if self._replay is None or not self._replay.get("complete"):
            return False
        self._replay = None
        self.finish()
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as numbers and tensors."""
        generators = [generator.get_state() for generator in self._generators]
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "complete": self.complete,
            "running": self._running,
            "order": self._order,
            "generators": generators,
            "loader_state": self.loader_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned; the next pass may resume the interrupted one."""
        self.epoch, self.batches, self.complete = state["epoch"], state["batches"], False
        self.loader_state = state["loader_state"]
        self._order = None
        self._replay = state if state["order"] is not None else None
        for generator, generator_state in zip(self._generators, state["generators"], strict=False):
            generator.set_state(generator_state)

    def load_loader_state(self, state: dict[str, Any]) -> None:
        """Load the state of a stateful loader, which does not tell by which random draws it ordered its pass."""
        self.batches, self.complete = _yielded(state), False
        self.loader_state, self._order = state, None
        self._replay = {"order": None, "running": True, "complete": bool(state.get("_iterator_finished"))}


def _yielded(state: dict[str, Any]) -> int:
    """Return the batches that torchdata's loader had given when `state` was taken, without and with workers."""
    if "_snapshot" in state:
        return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])
    return int(state["_num_yielded"])


class DataLoaderShard(DataLoader[Any]):
    """This process's batches, on its device. A `DataLoader` by type, which delegates to `base_dataloader`.

    `isinstance` also takes it for an instance of the class of `base_dataloader`.

    Args:
        source: source of the batches; or a dataset, all of whose batches this process reads.
        device: device that batches are moved to; None leaves them.
        rng_types: generators to synchronise at the start of each pass.
        generator: the generator that `rng_types` calls "generator".
        non_blocking: copy batches asynchronously.
        resumes_by_itself: after `load_state_dict` the next pass resumes in mid-epoch without `skip_first_batches`.
        batch_size: samples in one process's batch.
        total_batch_size: samples in the batches of all processes.
        skip: batches to skip at the start of each pass.
        progress: shared with the loader that this one was made of.
        use_stateful_dataloader: read a dataset by torchdata's loader.
        loader_arguments: further arguments of the loader that reads a dataset.

    Attributes:
        end_of_dataloader: whether the current batch is the last.
        remainder: samples of all processes in an uneven last round, without repeated ones; else -1.
    """

    def __init__(
        self,
        source: Any,
        device: torch.device | None = None,
        rng_types: Sequence[RNGType | str] = (),
        generator: torch.Generator | None = None,
        non_blocking: bool = False,
        resumes_by_itself: bool = False,
        batch_size: int | None = None,
        total_batch_size: int | None = None,
        skip: int = 0,
        progress: LoaderProgress | None = None,
        use_stateful_dataloader: bool = False,
        **loader_arguments: Any,
    ) -> None:
        # DataLoader.__init__ is not called, since this class delegates to `base_dataloader`.
        self._is_torchdata = use_stateful_dataloader and not hasattr(source, "open")
        if not hasattr(source, "open"):
            settings = {"batch_size": batch_size, "generator": generator, **loader_arguments}
            source = _reading(source, use_stateful_dataloader, settings)
            resumes_by_itself = resumes_by_itself or use_stateful_dataloader
            batch_size = total_batch_size = source.base.batch_size
        self.base_dataloader = source.base
        self.gradient_state = GradientState()
        self.device, self.end_of_dataloader, self.remainder = device, False, -1
        self.source, self._non_blocking = source, non_blocking
        self._resumes_by_itself = resumes_by_itself
        self.rng_types, self.synchronized_generator = tuple(rng_types), generator
        self.__dict__["batch_size"] = batch_size
        self.total_batch_size, self.skip_batches = total_batch_size, skip
        self._progress = progress or LoaderProgress(_generators(source.base))
        self._step = LoaderStep(None, False)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of `base_dataloader` where that is not PyTorch's own: callers ask for it by `isinstance`."""
        base = self.__dict__.get("base_dataloader")
        return type(self) if base is None or type(base) is DataLoader else type(base)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (type(self), self.__getstate__())

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether `base_dataloader` is torchdata's."""
        return hasattr(self.base_dataloader, "load_state_dict")

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
        """Set the epoch of the next pass, also of samplers and datasets with `set_epoch`."""
        self._progress.epoch = epoch
        self._set_epoch_inside(epoch)

    def get_sampler(self) -> Sampler[Any] | None:
        """Return the sampler of the rows; None for an iterable dataset."""
        return get_sampler(self)

    def set_sampler(self, sampler: Sampler[Any]) -> None:
        """Read rows in the order of another sampler.

        Raises:
            TrainError: The dataset is an iterable one.
        """
        inner: Any = self.base_dataloader.batch_sampler
        if inner is None and not isinstance(self.base_dataloader.sampler, BatchSampler):
            raise TrainError("an iterable dataset is read in its own order: it has no sampler to be replaced")
        inner = self.base_dataloader.sampler if inner is None else inner
        while not isinstance(inner, BatchSampler) and hasattr(inner, "batch_sampler"):
            inner = inner.batch_sampler
        inner.sampler = sampler

    def _set_epoch_inside(self, epoch: int) -> None:
        batch_sampler = self.base_dataloader.batch_sampler
        original = getattr(batch_sampler, "batch_sampler", batch_sampler)
        targets: tuple[Any, ...] = (
            original,
            getattr(original, "sampler", self.base_dataloader.sampler),
            self.base_dataloader.dataset,
        )
        for target in targets:
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._run(self._begin())

    def _begin(self) -> Iterator[LoaderStep]:
        skip = self.skip_batches
        if not skip:
            self._finish_loaded()
        synchronize_rng_states(self.rng_types, self.synchronized_generator)
        self._set_epoch_inside(self._progress.epoch)
        resumed = 0
        if self._resumes_by_itself and self._progress.batches:
            resumed = self._resume()
        with self._progress.begin(skip + resumed):
            steps = self.source.open(skip if self._progress.loader_state is not None else skip + resumed)
        return self._moved(steps)

    def _finish_loaded(self) -> None:
        """Begin the next epoch where a state was loaded that was saved at the last batch of a pass."""
        loader_state = self._progress.loader_state
        if self._progress.finish_loaded() and loader_state is not None:
            base: Any = self.base_dataloader
            base.load_state_dict(loader_state)
            for _ in base:  # nothing is left; a stateful loader learns here that the pass has ended
                pass

    def _resume(self) -> int:
        """Return the batches to skip after `load_state_dict`; load the state of a stateful loader."""
        progress = self._progress
        batches = progress.batches if progress.resumable else 0
        if batches and progress.loader_state is not None:
            self.base_dataloader.load_state_dict(progress.loader_state)
        return batches

    def _moved(self, steps: Iterator[LoaderStep]) -> Iterator[LoaderStep]:
        device = self.device
        if device is None or device.type == "cpu":
            return steps
        if self.source.runs_ahead and is_accelerator(device) and device.type != "mps":
            return move_ahead(steps, device)
        return move_each(steps, device, self._non_blocking)

    def _run(self, steps: Iterator[LoaderStep]) -> Iterator[Any]:
        progress, state = self._progress, self.gradient_state
        state._add_dataloader(self)
        try:
            with progress.running():
                for step in steps:
                    self._step, self.end_of_dataloader = step, step.last
                    self.remainder = step.total_real if step.uneven else -1
                    progress.batches += 1
                    progress.complete = step.last
                    progress.loader_state = step.state
                    yield step.batch
            progress.finish()
        finally:
            state._remove_dataloader(self)
            self.end_of_dataloader, self._step = False, LoaderStep(None, False)

    @property
    def is_uneven(self) -> bool:
        """Whether any process's current batch has repeated samples or another length."""
        return self._step.uneven

    def count_real(self, length: int) -> int:
        """Return how many of `length` rows computed from the current batch are not of repeated samples."""
        return real_rows(self._step, length)

    @property
    def rows(self) -> int:
        """Samples in the current batch of this process, repeated ones too; 0 if it has no tensors."""
        return self._step.rows or find_batch_size(self._step.batch) or 0

    @property
    def has_real(self) -> bool:
        """Whether the current batch has any sample that is not repeated."""
        return not self._step.uneven or self._step.real > 0

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "base_dataloader"}
        return {**state, "end_of_dataloader": False, "remainder": -1, "_step": LoaderStep(None, False)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, base_dataloader=state["source"].base)

    def skipping(self, batches: int) -> DataLoaderShard:
        """Return a copy of this loader that skips the first `batches` batches of every pass."""
        skipping = object.__new__(type(self))
        skipping.__dict__.update(self.__dict__)
        skipping.skip_batches = self.skip_batches + batches
        return skipping

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of this loader: that of torchdata's own, if this one was made to read a dataset by it."""
        if self._is_torchdata:
            base: Any = self.base_dataloader
            return self._progress.loader_state or base.state_dict()
        return self._progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        A stateful loader resumes by itself; another repeats the order of the interrupted pass, and `skip_first_batches`
        skips to the position.
        """
        if self._is_torchdata:
            self._progress.loader_state = None
            base: Any = self.base_dataloader
            base.load_state_dict(state_dict)
        else:
            self._progress.load_state_dict(state_dict)

    def load_loader_state(self, state_dict: dict[str, Any]) -> None:
        """Load the state of torchdata's own loader, as accelerate saves it; the next pass goes on from there."""
        if self._is_torchdata:
            self.load_state_dict(state_dict)
        else:
            self._progress.load_loader_state(state_dict)


class DataLoaderDispatcher(DataLoaderShard):
    """A prepared data loader whose batches process 0 reads for all."""


def _unpickled(kind: type[DataLoaderShard], state: dict[str, Any]) -> DataLoaderShard:
    loader = object.__new__(kind)
    loader.__setstate__(state)
    return loader


def _reading(dataset: Any, stateful: bool, settings: dict[str, Any]) -> StepSource:
    """Return the source of all batches of a dataset."""
    kind: Any = stateful_loader_class() if stateful else DataLoader
    return IterableSource(kind(dataset, **{name: value for name, value in settings.items() if value is not None}))


def _generators(base: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that the user gave the loader or its sampler."""
    batch_sampler = base.batch_sampler
    original = getattr(batch_sampler, "batch_sampler", batch_sampler)
    sampler = getattr(original, "sampler", base.sampler)
    found = [getattr(sampler, "generator", None), base.generator]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
