"""Host memory that copies of strict accelerators read and write after they have been launched.

Pinned memory must not be written to until the host has waited for the copies that read it. What copies to the host
write holds garbage before they arrive.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from .races import Access, Queue, detector

GARBAGE = 0xCD
"""The byte that memory holds before what is written to it has arrived."""

Span = tuple[int, int]
"""First address of host memory, and the one after its last."""


class DelayingQueue(Queue, Protocol):
    """A stream that does work later."""

    def delay(self, run: Callable[[], None], arrives: Arrival | None = None) -> None: ...


class Arrival(NamedTuple):
    """Where a copy to the host arrives."""

    span: Span
    copied: Access

    def overlaps(self, other: Span) -> bool:
        return self.span[0] < other[1] and other[0] < self.span[1]


class _Watched(NamedTuple):
    """Pinned memory that a copy reads until the host has waited for it: nothing may write to it before."""

    source: torch.Tensor
    checksum: int
    copied: Access

    def check(self) -> None:
        """Raise RaceError if the memory was written to; only note it if nothing has read the copy yet."""
        if self.copied.torn is None and _checksum(self.source) != self.checksum:
            message = f"pinned memory was written to before the host has waited for its copy: {self.copied}"
            self.copied.torn = message
            if self.copied.used:
                raise detector.report(message)


_watched: list[_Watched] = []
"""Pinned memory that copies read. The same memory may be read by several, which the host waits for one by one."""


def watch(source: torch.Tensor, copied: Access) -> _Watched:
    """Have writes to pinned memory found until the host has waited for its copy."""
    watched = _Watched(source, _checksum(source), copied)
    _watched.append(watched)
    return watched


def check_watched() -> None:
    """Check the pinned memory whose copies the host has waited for now.

    Raises:
        RaceError: It was written to before, and what was copied has been used.
    """
    finished = [each for each in _watched if detector.host_knows(each.copied)]
    if finished:
        _watched[:] = [each for each in _watched if not detector.host_knows(each.copied)]
        for each in finished:
            each.check()


def delayed_copy(into: DelayingQueue, target: torch.Tensor, source: torch.Tensor, copied: Access) -> None:
    """Queue a copy of pinned memory. Both tensors are dense and of equal shape, strides and dtype."""
    watched = watch(source, copied)

    def run() -> None:
        watched.check()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

    into.delay(run)


def late_arrival(from_: DelayingQueue, target: torch.Tensor, value: torch.Tensor, copied: Access) -> None:
    """Queue the arrival of `value` in the dense host tensor `target`, which holds garbage until then."""
    arriving = torch.empty_like(value).copy_(value)
    ctypes.memset(target.data_ptr(), GARBAGE, target.nbytes)

    def run() -> None:
        ctypes.memmove(target.data_ptr(), arriving.data_ptr(), arriving.nbytes)

    from_.delay(run, arrives=Arrival(span(target), copied))


def span(tensor: torch.Tensor) -> Span:
    """Return where a dense host tensor lies."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of `tensor` fill its memory without gaps, in any order: such memory is copied as it is."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.adler32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
