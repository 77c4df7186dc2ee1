"""Host memory that copies of strict accelerators read and write after they have been launched.

Pinned memory must not be written to until the host has waited for the copies that read it. What copies to the host
write holds garbage before they arrive: the host sees it after it has waited, later copies of ordered streams before.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from .races import Access, Queue, detector

GARBAGE = 0xCD
"""The byte that memory holds before what is written to it has arrived."""

Span = tuple[int, int]
"""First address of host memory, and the one after its last."""


class DelayingQueue(Queue, Protocol):
    """A stream that does work later."""

    def delay(self, run: Callable[[], None], for_host: bool = False) -> None: ...


class Arrival(NamedTuple):
    """A copy to the host that the host has not waited for: where it arrives, and what."""

    span: Span
    copied: Access
    values: torch.Tensor


class _Watched(NamedTuple):
    """Pinned memory that a copy reads until the host has waited for it: nothing may write to it before."""

    source: torch.Tensor
    checksum: int
    copied: Access
    is_arriving: bool

    def check(self) -> None:
        """Raise RaceError if the memory was written to; only note it if nothing has read the copy yet."""
        if self.copied.torn is None and _checksum(self.source) != self.checksum:
            message = f"pinned memory was written to before the host has waited for its copy: {self.copied}"
            self.copied.torn = message
            if self.copied.used:
                raise detector.report(message)


_watched: list[_Watched] = []
"""Pinned memory that copies read. The same memory may be read by several, which the host waits for one by one."""

_arrivals: list[Arrival] = []
"""Copies to the host that it has not waited for, in the order of their launches."""


def watch(source: torch.Tensor, copied: Access, arriving: Sequence[Arrival] = ()) -> _Watched:
    """Have writes to pinned memory found until the host has waited for its copy.

    Args:
        source: The memory.
        copied: The copy that reads it.
        arriving: What arrives in the memory before.
    """
    watched = _Watched(source, _checksum(_with_arriving(source, arriving)), copied, bool(arriving))
    _watched.append(watched)
    return watched


def check_watched() -> None:
    """Check the pinned memory whose copies the host has waited for now, and forget what has arrived.

    Raises:
        RaceError: It was written to before, and what was copied has been used.
    """
    if _arrivals:
        _arrivals[:] = [each for each in _arrivals if not detector.host_knows(each.copied)]
    finished = [each for each in _watched if detector.host_knows(each.copied)]
    if finished:
        _watched[:] = [each for each in _watched if not detector.host_knows(each.copied)]
        for each in finished:
            each.check()


def arriving_in(source: torch.Tensor, into: Queue) -> list[Arrival]:
    """Return what arrives in dense host memory that the next launch of `into` reads.

    Raises:
        RaceError: A copy to that memory is not ordered before.
    """
    found = _overlapping(span(source)) if _arrivals else []
    for each in found:
        if not detector.is_ordered(each.copied, into):
            raise detector.report(f"a copy on {into} reads host memory that no event orders after {each.copied}")
    return found


def check_written(target: torch.Tensor, from_: Queue) -> None:
    """Check host memory that the next launch of `from_` writes to.

    Raises:
        RaceError: An earlier copy that reads or writes that memory is not ordered before, or it was written to before.
    """
    if not (_watched or _arrivals) or not target.numel():
        return
    begin, end = target.data_ptr(), target.data_ptr() + _spanned_bytes(target)
    read = [each for each in _watched if _overlap(span(each.source), (begin, end))]
    for copied in (*(each.copied for each in read), *(each.copied for each in _overlapping((begin, end)))):
        if not detector.is_ordered(copied, from_):
            raise detector.report(f"a copy on {from_} writes host memory that no event orders after {copied}")
    gone = {id(each) for each in read}  # equality would compare tensors
    _watched[:] = [each for each in _watched if id(each) not in gone]
    for each in read:
        if not each.is_arriving:
            each.check()


def delayed_copy(
    into: DelayingQueue, target: torch.Tensor, source: torch.Tensor, copied: Access, arriving: Sequence[Arrival]
) -> None:
    """Queue a copy of pinned memory. Both tensors are dense and of equal shape, strides and dtype."""
    watched = watch(source, copied, arriving)
    values = _with_arriving(source, arriving)

    def run() -> None:
        if not arriving:
            watched.check()
        ctypes.memmove(target.data_ptr(), values.data_ptr(), source.nbytes)

    into.delay(run)


def run_arrived(source: torch.Tensor, arriving: Sequence[Arrival], run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Do a copy at its launch, while its dense source holds what arrives in it. It is no context manager: Dynamo traces
    the functions of `contextlib`."""
    if not arriving:
        return run()
    before, after = source.clone(), _with_arriving(source, arriving)
    ctypes.memmove(source.data_ptr(), after.data_ptr(), source.nbytes)
    try:
        return run()
    finally:
        ctypes.memmove(source.data_ptr(), before.data_ptr(), source.nbytes)


def late_arrival(from_: DelayingQueue, target: torch.Tensor, value: torch.Tensor, copied: Access) -> None:
    """Queue the arrival of `value` in the dense host tensor `target`, which holds garbage until then."""
    arriving = torch.empty_like(value).copy_(value)
    ctypes.memset(target.data_ptr(), GARBAGE, target.nbytes)
    _arrivals.append(Arrival(span(target), copied, arriving))

    def run() -> None:
        ctypes.memmove(target.data_ptr(), arriving.data_ptr(), arriving.nbytes)

    from_.delay(run, for_host=True)


def _with_arriving(source: torch.Tensor, arriving: Sequence[Arrival]) -> torch.Tensor:
    """Return dense host memory as it will be after copies have arrived in it."""
    if not arriving:
        return source
    whole = source.clone()
    begin, end = span(source)
    for (first, last), _, values in arriving:
        low, high = max(begin, first), min(end, last)
        ctypes.memmove(whole.data_ptr() + low - begin, values.data_ptr() + low - first, high - low)
    return whole


def _overlapping(memory: Span) -> list[Arrival]:
    return [each for each in _arrivals if _overlap(each.span, memory)]


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _spanned_bytes(tensor: torch.Tensor) -> int:
    return (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))) * tensor.itemsize


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
