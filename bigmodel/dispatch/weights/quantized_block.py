"""A streamed block whose weights cross the link quantised.

Its tensors stay exact, in host memory or in the checkpoint. Instead of them its carrier is fetched: a block of
quantised weights, in separate host memory or in an unlinked file. On the device the carrier arrives in staging memory
and is restored from there into the slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

import torch

from ...checkpoint import is_untouched, release
from ...checkpoint.write import Outgoing, offload
from ...devices import HOST
from ...devices.pinned import empty_weights
from .block import Block, HostTensor, content_version
from .outside_use import host_value, is_given_out
from .packing import Packing, WeightError


class QuantizedBlock(Block):
    """A block and its carrier.

    Args:
        name: The module's name in the model.
        tensors: Its tensors, each once.
        packings: Packing of each tensor; None for one that is not quantised.

    Attributes:
        carrier: The block that is fetched; created by `carry_in_memory` or `carry_on_disk`.
        errors: Quantisation error of each quantised weight, by name.
    """

    def __init__(self, name: str, tensors: list[HostTensor], packings: list[Packing | None]) -> None:
        super().__init__(name, tensors)
        self.packings = packings
        self.carrier = Block(name, [])
        self.errors: dict[str, WeightError] = {}
        self._carried: list[tuple[torch.Tensor, int] | None] = [None] * len(tensors)

    @property
    def on_disk(self) -> bool:
        """Whether its carrier is in a file."""
        return self.carrier.on_disk

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory that restoring needs in addition to the carrier and the slot."""
        return max((packing.scratch_bytes for packing in self.packings if packing is not None), default=0)

    def carry_in_memory(self, pin: bool) -> None:
        """Create the carrier in host memory, optionally pinned."""
        kinds = [_kind(tensor, packing) for tensor, packing in zip(self.tensors, self.packings)]
        carried = [HostTensor(torch.empty(shape, dtype=dtype, device="meta"), dtype) for dtype, shape in kinds]
        carrier = Block(self.name, carried)
        carrier.packed = empty_weights(carrier.layout.nbytes, pin)
        for tensor, view in zip(carried, carrier.layout.views(carrier.packed)):
            tensor.value = view
        self.carrier = carrier
        self.refresh()

    def outgoing(self) -> list[Outgoing]:
        """Return the tensors to write for `carry_on_disk`, each quantised when it is written."""
        return [
            Outgoing(tensor.name, torch.uint8, (packing.layout.nbytes,), partial(self._packed, index, packing))
            for index, (tensor, packing) in enumerate(zip(self.tensors, self.packings))
            if packing is not None
        ]

    def carry_on_disk(self, written: dict[str, torch.Tensor]) -> None:
        """Create the carrier from views of the file that contains the tensors of `outgoing`, by name."""
        values = [written.get(tensor.name, tensor.value) for tensor in self.tensors]
        self.carrier = Block(self.name, [HostTensor(value, value.dtype) for value in values])
        self._carried = [(tensor.value, content_version(tensor.value)) for tensor in self.tensors]

    def refresh(self) -> None:
        """Quantise weights again that were written or replaced since."""
        for index, tensor in enumerate(self.tensors):
            carried = self._carried[index]
            version = content_version(tensor.value)
            if carried is None or carried[0] is not tensor.value or carried[1] != version or is_given_out(tensor.value):
                self._carry(index)
                self._carried[index] = tensor.value, version

    def restore(
        self, staged: torch.Tensor, memory: torch.Tensor, scratch: torch.Tensor, begin: int = 0, end: int | None = None
    ) -> None:
        """Restore the weights from the carrier in `staged` into `memory`; all arguments are on the device.

        Args:
            staged: uint8, the carrier's packed buffer.
            memory: uint8, the block's packed buffer.
            scratch: uint8, of at least `scratch_bytes`.
            begin: Bytes of the carrier that were restored by previous calls.
            end: Bytes of the carrier that have arrived; None: all.
        """
        layout, end = self.carrier.layout, self.carrier.layout.nbytes if end is None else end
        with torch.no_grad():
            views = zip(self.packings, layout.places, layout.views(staged), self.layout.views(memory))
            for packing, place, carried, target in views:
                before, now = begin - place.offset, end - place.offset
                if packing is not None:
                    groups = packing.groups_within(before), packing.groups_within(now)
                    packing.unpack(carried, target, scratch, *groups)
                elif before < place.nbytes <= now:
                    target.copy_(carried)

    def refuse_training(self) -> str | None:
        """Return the name of a quantised weight that requires a gradient, None if there is none."""
        pairs = zip(self.tensors, self.packings)
        return next((t.name for t, packing in pairs if packing is not None and t.value.requires_grad), None)

    def _carry(self, index: int) -> None:
        tensor, packing, carried = self.tensors[index], self.packings[index], self.carrier.tensors[index]
        with torch.no_grad():
            if packing is not None:
                self._pack(tensor, packing, carried.value)
            elif self.carrier.packed is not None:
                carried.value.copy_(tensor.value)
            else:
                carried.value = tensor.value

    def _packed(self, index: int, packing: Packing) -> torch.Tensor:
        packed = torch.empty(packing.layout.nbytes, dtype=torch.uint8, device=HOST)
        with torch.no_grad():
            self._pack(self.tensors[index], packing, packed)
        return packed

    def _pack(self, tensor: HostTensor, packing: Packing, packed: torch.Tensor) -> None:
        self.errors[tensor.name] = packing.pack(tensor.value, packed, tensor.name)
        _release_pages(tensor.value)


def carry_on_disk(blocks: Collection[QuantizedBlock], folder: Path) -> None:
    """Quantise `blocks` into one unlinked file in `folder`, which is deleted with them."""
    written = offload(folder, [outgoing for block in blocks for outgoing in block.outgoing()])
    for block in blocks:
        block.carry_on_disk(written)


def packings_of(tensors: Iterable[HostTensor], offload_dtype: str) -> list[Packing | None]:
    """Return the packing of each tensor; None for those that are not quantised: buffers, vectors, small tensors."""
    return [None if tensor.is_buffer else Packing.of(tensor.value, offload_dtype) for tensor in tensors]


def _kind(tensor: HostTensor, packing: Packing | None) -> tuple[torch.dtype, torch.Size]:
    if packing is None:
        return tensor.value.dtype, tensor.value.shape
    return torch.uint8, torch.Size([packing.layout.nbytes])


def _release_pages(weight: torch.Tensor) -> None:
    """Release the pages of a mapped weight that quantising has read.

    All its pages are in memory now, so `is_untouched` is False for a tensor that is not mapped; that is left alone.
    """
    if type(host_value(weight)) is torch.Tensor and is_untouched(weight):
        release(weight)
