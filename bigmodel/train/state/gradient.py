"""GradientState: the training loop's position in an accumulation window and in its data loaders."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from bigmodel.train import environment
from bigmodel.train.configuration import GradientAccumulationPlugin
from bigmodel.train.state.shared import SharedState


class TrackedDataLoader(Protocol):
    """The interface of a data loader that `GradientState` uses."""

    end_of_dataloader: bool
    remainder: int

    def count_real(self, length: int) -> int:
        """Return how many of `length` rows computed from this rank's current batch are not of repeated samples."""


class GradientState(SharedState):
    """Shared by the Accelerator, its optimizers, schedulers and data loaders. Every instance shares one state.

    Attributes:
        sync_gradients: whether the current backward pass ends an accumulation window.
        dataloader_references: the data loaders being iterated over, the innermost last.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    dataloader_references: list[TrackedDataLoader]
    plugin: GradientAccumulationPlugin

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self.dataloader_references = []
            self.plugin = GradientAccumulationPlugin(num_steps=1)
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    def _picklable_state(self) -> dict[str, Any]:
        return {**self.__dict__, "dataloader_references": []}

    @property
    def initialized(self) -> bool:
        """Whether the state was created."""
        return bool(self._shared_state)

    @property
    def num_steps(self) -> int:
        """Backward passes per optimizer step."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether the scheduler counts accumulating passes."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of a data loader ends the accumulation window."""
        return self.plugin.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The plugin's fields that were changed."""
        return self.plugin.to_kwargs()

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether an XLA device has reduced the gradients: with FSDP always, else never, as there is none."""
        return environment.flag("ACCELERATE_USE_FSDP")

    @property
    def active_dataloader(self) -> TrackedDataLoader | None:
        """The innermost data loader being iterated over, or None."""
        return self.dataloader_references[-1] if self.dataloader_references else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared data loader is being iterated over."""
        return bool(self.dataloader_references)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active data loader has yielded its last batch."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the last global batch without repeated ones; -1 before it, or if none is repeated."""
        active = self.active_dataloader
        return active.remainder if active is not None else -1

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set `sync_gradients`; for training loops of other libraries that accumulate by themselves."""
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: TrackedDataLoader) -> None:
        self.dataloader_references.append(dataloader)

    def _remove_dataloader(self, dataloader: TrackedDataLoader) -> None:
        references = self.__dict__.get("dataloader_references", [])  # none after a reset
        for position in range(len(references) - 1, -1, -1):
            if references[position] is dataloader:
                del references[position]
                return

    @classmethod
    def _reset_state(cls) -> None:
        cls._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation: {self.plugin}\n"
        )
