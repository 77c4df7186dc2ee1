"""The race detector: every access to device memory must be ordered after the conflicting ones before it.

It follows CUDA's rules, as torch's CUDA Sanitizer does. Work of one stream runs in order. Work of two streams is
ordered only by an event that one has recorded and the other waits for, or by the host, which has waited for one before
it launches the other. A write conflicts with every earlier access of the same memory, a read with every earlier write.
Freeing memory counts as a write by the stream that it was allocated on: that stream may use it again at once, unless
`record_stream` has told the allocator of other users.

Nothing need run late to be found: computation may be done at once, what is checked is the order that the program asked
for. Clocks are vector clocks over one count of launches: a stream knows, for each other stream, up to which launch that
one has finished before its own next launch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import torch

from ...errors import RaceError
from ..forks import new_rlock

Place = tuple[CodeType, int]
"""A place in the program: its code, and the index of the instruction; the line is looked up only for a report."""

Clock = dict[int, int]
"""For each stream, by number, the last of its launches that is ordered before."""

_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), "<")
"""Prefixes of files whose frames are not reported: this package, torch, generated code."""


class Queue(Protocol):
    """A stream, as the detector and the allocator see it.

    Attributes:
        number: Tells it from others.
        known: What is ordered before its next launch.
        position: How much of its work could be late so far.
    """

    number: int
    known: Clock
    position: int

    def record_event(self) -> Any:
        """Return the event of all its work so far."""
        ...

    def has_delayed(self, position: int | None = None) -> bool:
        """Whether any work up to `position` has not been done."""
        ...

    def run_delayed(self, position: int | None = None, for_host: bool = True) -> None:
        """Do the work up to `position`; without `for_host`, leave what only the host can tell apart."""
        ...

    def when_done(self, run: Callable[[], None], others: Iterable[tuple[Queue, int]] = ()) -> None:
        """Call `run` after all present work, and that of `others` up to a position."""
        ...


class Access:
    """One operation that accesses memory.

    Attributes:
        stream: The stream that it was launched on.
        time: When, counted in launches.
        what: The operation, or what it does.
        place: Where in the program it was launched.
        used: Whether anything has read what it wrote.
        torn: The defect of the memory that it wrote, reported if that is read; empty without one.
    """

    __slots__ = ("place", "stream", "time", "torn", "used", "what")

    def __init__(self, stream: Queue, time: int, what: object, place: Place | None) -> None:
        self.stream = stream
        self.time = time
        self.what = what
        self.place = place
        self.used = False
        self.torn: str | None = None

    def __str__(self) -> str:
        return f"{self.what} on {self.stream} at {_named(self.place)}"


class History:
    """The last accesses to one allocation that later ones may conflict with.

    Attributes:
        nbytes: Its bytes.
        home: The stream that it was allocated on.
        users: Further streams that the allocator was told of, by number.
        writes: Those that write: first byte, the one after the last, access. The first is the allocation itself, since
            work of the memory's previous owner, launched on the same stream before, may still use it.
        reads: Those that read, since the last write of the same bytes: the last of each stream and range.
    """

    __slots__ = ("home", "nbytes", "reads", "users", "writes")

    def __init__(self, nbytes: int, allocated: Access) -> None:
        self.nbytes = nbytes
        self.home = allocated.stream
        self.users: dict[int, Queue] = {}
        self.writes: list[tuple[int, int, Access]] = [(0, nbytes, allocated)]
        self.reads: dict[tuple[int, int, int], Access] = {}

    def accesses(self) -> list[Access]:
        """Return all of them."""
        return [*[access for _begin, _end, access in self.writes], *self.reads.values()]


Range = tuple[History, int, int]
"""Bytes of one allocation: the first, and the one after the last."""


class Detector:
    """The order of all launches of this process, and the races found.

    Attributes:
        lock: Guards streams, events, histories and arenas.
        time: Number of launches so far.
        host: What the host has waited for.
        reports: Messages of the races found.
    """

    def __init__(self) -> None:
        self.lock = new_rlock()
        self.time = 0
        self.host: Clock = {}
        self.reports: list[str] = []
        self._floor = 0

    def forget(self) -> None:
        """Take everything launched so far as finished, as after synchronising all devices."""
        with self.lock:
            self._floor = self.time
            self.host.clear()

    def launch(self, stream: Queue, what: object, reads: Iterable[Range] = (), writes: Iterable[Range] = ()) -> Access:
        """Record an operation of `stream` and its accesses. The lock is held.

        Raises:
            RaceError: One of them is not ordered after a conflicting one.
        """
        self.time += 1
        access = Access(stream, self.time, what, _place())
        for each in reads:
            self._read(access, each)
        for each in writes:
            self._write(access, each)
        return access

    def allocated(self, nbytes: int, home: Queue) -> History:
        """Return the history of new memory of `nbytes`, allocated on the stream `home`."""
        return History(nbytes, Access(home, self.time, "allocation", None))

    def freed(self, history: History) -> None:
        """Report work of other streams that may still use memory which is free now; raise nothing. The lock is held."""
        home = history.home
        for access in history.accesses():
            if access.stream is home or access.stream.number in history.users or self.is_ordered(access, home):
                continue
            self.reports.append(
                f"memory of {history.nbytes} bytes was freed at {_named(_place())} while another stream may "
                f"use it: {access}; call record_stream, or wait for that stream first"
            )

    def is_ordered(self, earlier: Access, stream: Queue) -> bool:
        """Whether the next launch of `stream` runs after `earlier` has finished."""
        number, time = earlier.stream.number, earlier.time
        return (
            number == stream.number
            or time <= self._floor
            or time <= stream.known.get(number, 0)
            or time <= self.host.get(number, 0)
        )

    def host_knows(self, earlier: Access) -> bool:
        """Whether the host has waited for `earlier`."""
        return earlier.time <= self._floor or earlier.time <= self.host.get(earlier.stream.number, 0)

    def report(self, message: str) -> RaceError:
        """Record a race; return the error to raise."""
        self.reports.append(message)
        return RaceError(message)

    def _read(self, access: Access, read: Range) -> None:
        history, begin, end = read
        for first, last, earlier in history.writes:
            if first < end and begin < last:
                if earlier.stream is not access.stream or earlier.torn is not None:
                    self._check(access, "reads", read, earlier)
                earlier.used = True
        history.reads[access.stream.number, begin, end] = access

    def _write(self, access: Access, written: Range) -> None:
        history, begin, end = written
        kept = []
        for entry in history.writes:
            first, last, earlier = entry
            if first < end and begin < last and earlier.stream is not access.stream:
                self._check(access, "writes", written, earlier)
            if first < begin or end < last:
                kept.append(entry)
        if history.reads:
            for (_, first, last), earlier in history.reads.items():
                if first < end and begin < last and earlier.stream is not access.stream:
                    self._check(access, "writes", written, earlier)
            history.reads = {key: earlier for key, earlier in history.reads.items() if key[1] < begin or end < key[2]}
        kept.append((begin, end, access))
        history.writes = kept

    def _check(self, access: Access, does: str, where: Range, earlier: Access) -> None:
        history, begin, end = where
        if earlier.stream is not access.stream and not self.is_ordered(earlier, access.stream):
            raise self.report(
                f"{access} {does} bytes {begin} to {end} of {history.nbytes}, and no event orders it after {earlier}"
            )
        if earlier.torn is not None and does == "reads":
            raise self.report(f"{access} reads what is torn: {earlier.torn}")


def joined(clock: Clock, other: Mapping[int, int]) -> None:
    """Let `clock` know what `other` knows."""
    for number, time in other.items():
        if time > clock.get(number, 0):
            clock[number] = time


_is_inside: dict[str, bool] = {}
"""Whether frames of a file are not reported, by its name."""


def _place() -> Place | None:
    """Return where the running operation was called: the innermost frame outside torch and this package."""
    frame: FrameType | None = sys._getframe(4)  # the three callers before it are of this package
    while frame is not None:
        code = frame.f_code
        inside = _is_inside.get(code.co_filename)
        if inside is None:
            inside = _is_inside[code.co_filename] = code.co_filename.startswith(_INSIDE)
        if not inside:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def _named(place: Place | None) -> str:
    if place is None:
        return "an unknown place"
    code, instruction = place
    line = next((line for begin, end, line in code.co_lines() if begin <= instruction < end), code.co_firstlineno)
    return f"{code.co_filename}:{line} in {code.co_name}"


detector = Detector()
