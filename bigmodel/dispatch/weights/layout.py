"""The layout of a block's tensors in one packed buffer, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...limits import ALIGNMENT


@dataclass(frozen=True)
class Place:
    """The place of one tensor in a packed buffer: `offset` and `nbytes` in bytes, its dtype and shape."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class Layout:
    """The places of a block's tensors in a packed buffer of `nbytes` bytes."""

    places: tuple[Place, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[torch.dtype, torch.Size]]) -> Layout:
        """Lay out tensors of the given dtypes and shapes one after another, each aligned."""
        places: list[Place] = []
        offset = 0
        for dtype, shape in tensors:
            nbytes = dtype.itemsize * shape.numel()
            places.append(Place(offset, nbytes, dtype, shape))
            offset = _align(offset + nbytes)
        return cls(tuple(places), offset)

    def views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor per place, viewing the uint8 tensor `packed`, with its version counter."""
        # A view of another dtype that is made in inference mode is an inference tensor, which has no version counter.
        with torch.inference_mode(packed.is_inference()):
            return [packed[p.offset : p.offset + p.nbytes].view(p.dtype).view(p.shape) for p in self.places]


def largest(layouts: Sequence[Layout]) -> int:
    """Return the bytes of a packed buffer that each of `layouts` fits into."""
    return max((layout.nbytes for layout in layouts), default=0)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
