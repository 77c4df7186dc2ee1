"""What is copied to a device for a block, whereto, and what remains to be done there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .block import Block
from .quantized_block import QuantizedBlock


@dataclass(frozen=True, eq=False)
class Arrival:
    """One fetch of a block into a slot.

    Attributes:
        block: Whose bytes are copied: the block's own, or those of a quantised one's carrier.
        into: The device memory that they are copied to.
        slab: The slot that holds the block afterwards: the same memory, or what `finish` fills.
        finish: What is done on the copy stream behind the last copy.
    """

    block: Block
    into: torch.Tensor
    slab: torch.Tensor
    finish: Callable[[], None] | None = None

    @classmethod
    def straight(cls, block: Block, slab: torch.Tensor) -> Arrival:
        """Return the fetch of a block that is copied into its slot as it is."""
        return cls(block, slab, slab)

    def copy(self) -> None:
        """Do all of it, for a block in host memory."""
        self.block.fetch(self.into)
        if self.finish is not None:
            self.finish()


class Staging:
    """Device memory in which the carriers of quantised blocks arrive, one after another.

    One is enough: the copy stream restores each before it copies the next.

    Args:
        device: Where.
        blocks: The blocks whose carriers must fit.
    """

    def __init__(self, device: torch.device, blocks: Sequence[QuantizedBlock]) -> None:
        carried = max((block.carrier.layout.nbytes for block in blocks), default=0)
        scratch = max((block.scratch_bytes for block in blocks), default=0)
        self._carried = torch.empty(carried, dtype=torch.uint8, device=device)
        self._scratch = torch.empty(scratch, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it takes."""
        return self._carried.nbytes + self._scratch.nbytes

    def arrival(self, block: QuantizedBlock, slab: torch.Tensor) -> Arrival:
        """Return the fetch of `block` into `slab`; what changed since it was carried last is carried anew."""
        block.refresh()
        staged = self._carried[: block.carrier.layout.nbytes]
        return Arrival(block.carrier, staged, slab, partial(block.restore, staged, slab, self._scratch))
