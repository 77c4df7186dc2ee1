"""How far a data loader has come, and how to draw the order of an interrupted pass again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigmodel.train.random_state import host_state, set_host_state


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
