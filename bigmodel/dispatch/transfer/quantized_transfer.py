"""Transfers: what is copied to a device for a block, to where, and how quantised weights are restored there."""

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
"""Parts in which a quantised block comes over the link: after the last byte half of it remains to be restored."""

PART_BYTES = 256 * 2**10
"""Least bytes of a part: each takes a copy and a kernel of its own."""


class Transfer:
    """One fetch of a block that is copied into its slot as it is.

    Attributes:
        block: Whose bytes are copied.
        into: The device memory that they are copied to.
        memory: The slot that holds the block afterwards.
    """

    def __init__(self, block: Block, memory: torch.Tensor) -> None:
        self.block = block
        self.into = memory
        self.memory = memory

    def before(self, after: Sequence[Event]) -> Sequence[Event]:
        """Return what must be done before the first copy, given what must be before the slot is overwritten."""
        return after

    def finish(self, copied: Event) -> Event:
        """Return the event of the block's being there, given that of its last copy. Called once that is queued."""
        return copied


class QuantizedTransfer(Transfer):
    """One fetch of a quantised block: its carrier is copied into staging memory and restored from there.

    From host memory it comes in parts, each of which is restored while the next one is on its way.

    Args:
        block: The block.
        memory: The slot that it is restored into.
        staging: Lends the memory.
        buffer: Which part of it.
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
        """Copy the block from host memory, part by part; return the event of its being there."""
        before, nbytes = self.before(after), self.block.layout.nbytes
        part = max(PART_BYTES, -(-nbytes // PARTS))
        for begin in range(0, nbytes, part):
            end = min(begin + part, nbytes)
            copied = link.submit(partial(self._copy, begin, end), before, end - begin)
            before = ()
            # What is restored of one part comes after what was of those before, and fails if that did.
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
    """Room for one carrier; `restored` is when what it held last is needed no more."""

    memory: torch.Tensor
    restored: Event


class QuantizedTransfers:
    """Device memory in which the carriers of quantised blocks arrive in turns, and the stream that restores them.

    Args:
        device: Where.
        blocks: The blocks whose carriers must fit.
    """

    def __init__(self, device: torch.device, blocks: Sequence[QuantizedBlock]) -> None:
        carried = max((block.carrier.layout.nbytes for block in blocks), default=0)
        scratch = max((block.scratch_bytes for block in blocks), default=0)
        memory = torch.empty(RESTORE_BUFFERS * carried + scratch, dtype=torch.uint8, device=device)
        self.nbytes = memory.nbytes
        """Bytes of device memory that it takes."""
        self.stream = copy_stream(device)
        """What restores, beside copies and computing."""
        # A device that computes behind the host may not be done yet with what lay in this memory before.
        unused = self.stream.compute_mark()
        rooms = [memory[index * carried : (index + 1) * carried] for index in range(RESTORE_BUFFERS)]
        self._buffers = [_Buffer(room, unused) for room in rooms]
        self._scratch = memory[RESTORE_BUFFERS * carried :]

    def start(self, block: QuantizedBlock, memory: torch.Tensor) -> QuantizedTransfer:
        """Return the fetch of `block` into `memory`; what changed since it was carried last is carried anew."""
        block.refresh()
        self._buffers.append(self._buffers.pop(0))
        return QuantizedTransfer(block, memory, self, self._buffers[-1])

    def restore(self, block: QuantizedBlock, staged: torch.Tensor, memory: torch.Tensor, begin: int, end: int) -> None:
        """Write the part of `block` that is `staged` in these bytes into `memory`."""
        block.restore(staged, memory, self._scratch, begin, end)
