"""The layout of a block's tensors in one packed buffer, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from ...limits import ALIGNMENT


@dataclass(frozen=True)
class Place:
    """The place of one tensor in a packed buffer.

    Attributes:
        offset: Of its first byte.
        nbytes: Its bytes, without gaps.
        dtype: Its dtype.
        shape: Its shape.
        strides: Its strides in elements, if it is not contiguous.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...] | None = None

    def view(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the tensor that views the uint8 tensor `packed`."""
        flat = packed[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)


@dataclass(frozen=True)
class Layout:
    """The places of a block's tensors in a packed buffer of `nbytes` bytes."""

    places: tuple[Place, ...]
    nbytes: int

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[torch.dtype, torch.Size]], strides: Iterable[tuple[int, ...] | None] = ()
    ) -> Layout:
        """Lay out tensors of the given dtypes and shapes one after another, each aligned; those that have `strides`
        with these."""
        places: list[Place] = []
        offset = 0
        for (dtype, shape), order in zip_longest(tensors, strides):
            nbytes = dtype.itemsize * shape.numel()
            places.append(Place(offset, nbytes, dtype, shape, order))
            offset = _align(offset + nbytes)
        return cls(tuple(places), offset)

    def views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return one tensor per place, viewing the uint8 tensor `packed`, with its version counter."""
        # A view of another dtype that is made in inference mode is an inference tensor, which has no version counter.
        with torch.inference_mode(packed.is_inference()):
            return [place.view(packed) for place in self.places]


def strides_when_moved(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides that ``tensor.to(device)`` has, None if it is contiguous: kernels of other layouts, such as
    channels last, compute other last bits."""
    return None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def largest(layouts: Sequence[Layout]) -> int:
    """Return the bytes of a packed buffer that each of `layouts` fits into."""
    return max((layout.nbytes for layout in layouts), default=0)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
