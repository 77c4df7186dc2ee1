"""Transfers: the copies that bring one block to a device, and the restoring of quantised weights there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...devices import CopyStream, Event, copy_stream
from ...limits import RESTORE_BUFFERS
from ..weights.block import Block
from ..weights.quantized_block import QuantizedBlock

PARTS = 2
"""Parts in which a quantised block crosses the link: the first is restored while the second is copied."""

PART_BYTES = 256 * 2**10
"""Smallest part in bytes: each part takes a copy and a kernel launch."""


class Transfer:
    """One fetch of a block that is copied directly into its slot.

    Attributes:
        block: The block to copy.
        into: Target of the copy in device memory.
        memory: Memory of the slot that holds the block afterwards.
    """

    def __init__(self, block: Block, memory: torch.Tensor) -> None:
        self.block = block
        self.into = memory
        self.memory = memory

    def before(self, after: Sequence[Event]) -> Sequence[Event]:
        """Return the events that must pass before the first copy, given those for overwriting the slot."""
        return after

    def finish(self, copied: Event) -> Event:
        """Return the event of the block's arrival, given that of its last copy. Called once that is queued."""
        return copied


class QuantizedTransfer(Transfer):
    """One fetch of a quantised block: its carrier is copied into a staging buffer on the device and restored from it.

    From host memory it is copied in parts, each of which is restored while the next one is copied.

    Args:
        block: The block.
        memory: Memory of the slot that it is restored into.
        staging: The staging memory.
        buffer: The staging buffer to use.
    """

    def __init__(
        self, block: QuantizedBlock, memory: torch.Tensor, staging: QuantizedTransfers, buffer: _Buffer
    ) -> None:
        super().__init__(block.carrier, memory)
        self.into = buffer.memory[: block.carrier.layout.nbytes]
        self._quantized = block
        self._staging = staging
        self._buffer = buffer
        self._after: Sequence[Event] = ()

    def before(self, after: Sequence[Event]) -> Sequence[Event]:
        self._after = after
        return (self._buffer.restored,)

    def finish(self, copied: Event) -> Event:
        return self._restore(0, self.block.layout.nbytes, copied)

    def run(self, link: CopyStream, after: Sequence[Event]) -> Event:
        """Copy the block from host memory, part by part; return the event of its arrival."""
        before, nbytes = self.before(after), self.block.layout.nbytes
        part = max(PART_BYTES, -(-nbytes // PARTS))
        for begin in range(0, nbytes, part):
            end = min(begin + part, nbytes)
            copied = link.submit(partial(self._copy, begin, end), before, end - begin)
            before = ()
            # Parts are restored in order; an error of one is raised in the next.
            self._after = (self._restore(begin, end, copied),)
        return self._after[0]

    def _copy(self, begin: int, end: int) -> None:
        packed = self.block.packed
        assert packed is not None
        self.into[begin:end].copy_(packed[begin:end], non_blocking=True)

    def _restore(self, begin: int, end: int, copied: Event) -> Event:
        work = partial(self._staging.restore, self._quantized, self.into, self.memory, begin, end)
        self._buffer.restored = self._staging.stream.submit(work, (copied, *self._after))
        return self._buffer.restored


@dataclass(eq=False)
class _Buffer:
    """Staging memory for one carrier; `restored` is the event after which its last content is no longer needed."""

    memory: torch.Tensor
    restored: Event


class QuantizedTransfers:
    """Staging buffers on a device for the carriers of quantised blocks, and the stream that restores them.

    Args:
        device: The device.
        blocks: The blocks whose carriers must fit.
    """

    def __init__(self, device: torch.device, blocks: Sequence[QuantizedBlock]) -> None:
        carried = max((block.carrier.layout.nbytes for block in blocks), default=0)
        scratch = max((block.scratch_bytes for block in blocks), default=0)
        self.memory = memory = torch.empty(RESTORE_BUFFERS * carried + scratch, dtype=torch.uint8, device=device)
        self.nbytes = memory.nbytes
        """Bytes of device memory of the buffers."""
        self.stream = copy_stream(device)
        """Stream that restores, concurrent with copies and compute."""
        # An asynchronous device may still use the previous contents of this memory.
        unused = self.stream.compute_mark()
        slices = [memory[index * carried : (index + 1) * carried] for index in range(RESTORE_BUFFERS)]
        self._buffers = [_Buffer(each, unused) for each in slices]
        self._scratch = memory[RESTORE_BUFFERS * carried :]

    def start(self, block: QuantizedBlock, memory: torch.Tensor) -> QuantizedTransfer:
        """Return the fetch of `block` into `memory`, after quantising changed weights again."""
        block.refresh()
        self._buffers.append(self._buffers.pop(0))
        return QuantizedTransfer(block, memory, self, self._buffers[-1])

    def restore(self, block: QuantizedBlock, staged: torch.Tensor, memory: torch.Tensor, begin: int, end: int) -> None:
        """Restore the part of `block` whose bytes `begin` to `end` are in `staged` into `memory`."""
        block.restore(staged, memory, self._scratch, begin, end)
