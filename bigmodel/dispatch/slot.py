"""A slot: device memory in which streamed blocks take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..devices import Event
from .block import Block
from .slab import storage_of


@dataclass(eq=False)
class Slot:
    """Device memory that holds one block at a time.

    `users` counts the forwards that run on its content now; `last_use` orders slots by when they were last wanted;
    `prefetched` tells that its content was fetched before anybody asked for it, `shown` that the model refers to it;
    `marks` are the computations that must end before the content may be overwritten; `storage` tells its memory from
    other memory.
    """

    slab: torch.Tensor
    transient: bool = False
    content: Block | None = None
    users: int = 0
    last_use: int = 0
    version: int = 0
    prefetched: bool = False
    shown: bool = False
    ready: Event | None = None
    marks: list[Event] = field(default_factory=list)
    views: dict[Block, list[torch.Tensor]] = field(default_factory=dict)
    storage: int = field(init=False)

    def __post_init__(self) -> None:
        self.storage = storage_of(self.slab)

    def show(self, block: Block) -> None:
        """Make the model refer to the tensors of `block`, the content, that lie here."""
        # Who came first may show the same weights as leaves that gradients flow to.
        if not self.shown:
            views = self.views.get(block)
            if views is None:
                views = self.views[block] = block.device_views(self.slab)
            self.shown = True
            block.show(views)

    def show_host(self) -> None:
        """Make the model refer to the host tensors of the content again, with the state that forwards have written.

        Raises:
            Exception: Whatever keeping the state raised; the host tensors are shown all the same.
        """
        block = self.content
        if self.shown and block is not None:
            try:
                block.keep_state()
            except Exception:
                self.shown = False
                block.show_host()
                raise
            block.show_host()
            self.shown = False


def least_wanted(slots: Sequence[Slot]) -> Slot:
    """Return the one to overwrite: an empty one, else the one that was wanted longest ago."""
    if len(slots) == 1:
        return slots[0]
    return min(slots, key=lambda slot: (slot.content is not None, slot.last_use))
