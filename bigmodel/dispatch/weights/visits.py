"""Visits: the protocol by which a forward acquires, uses and releases weights; their order, and their counters."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from .fork_safe import ForkSafe

R = TypeVar("R")
H = TypeVar("H")
T = TypeVar("T")
B = TypeVar("B")


class Visited(ForkSafe, Generic[R, H]):
    """Base class of resources that forwards of several threads enter and leave, safe against Ctrl-C at any point.

    Python raises KeyboardInterrupt only at calls and backward jumps. The protocol relies on that:

    - A visit has a list of the resources that it holds, empty at first.
    - `_enter` appends to the list and increments the matching use counts without a call in between, so both happen or
      neither. It may raise before or after.
    - `_leave` releases the resources in the list; it decrements the counts and empties the list in the same way. If it
      is interrupted or fails it is called again, and completes the rest.

    Counts and lists therefore agree at any time, and a visit leaves nothing held.

    Type parameters: the request of a visit, and the resource that it holds.

    Attributes:
        _lock: Guards all shared state; available to a subclass's `_start`.
        _changed: Notified when a resource is released.
    """

    def _start(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @abstractmethod
    def _enter(self, request: R, held: list[H]) -> None:
        """Wait for the requested resource and append it to `held`."""

    @abstractmethod
    def _leave(self, held: list[H]) -> None:
        """Release the resources in `held`, possibly none, and empty it."""

    def visit(self, request: R, compute: Callable[[list[H]], T]) -> T:
        """Return ``compute(held)``, called while the requested resources are held.

        Raises:
            Exception: The error of entering, `compute` or leaving; nothing is held then.
        """
        if not self.is_started:
            self.start()
        held: list[H] = []
        try:
            self._enter(request, held)
            return compute(held)
        finally:
            try:
                self._leave(held)
            except BaseException:
                self._leave(held)
                raise

    @contextmanager
    def use(self, request: R) -> Iterator[list[H]]:
        """Hold the requested resources within this context. Not safe against Ctrl-C; use `visit` for that."""
        if not self.is_started:
            self.start()
        held: list[H] = []
        try:
            self._enter(request, held)
            yield held
        finally:
            self._leave(held)


class _LastVisit(threading.local):
    """The block that the calling thread has visited last."""

    block: object = None


class VisitOrder(Generic[B]):
    """Predicts the order of blocks. Thread-safe.

    The predicted successor of a block is the one that a thread visited after it the last time. A prediction may be
    wrong, for example after a block that was skipped or repeated.

    Args:
        blocks: The blocks in the order predicted at first, cyclically.
    """

    def __init__(self, blocks: Sequence[B]) -> None:
        self._next: dict[object, B] = dict(zip(blocks, [*blocks[1:], *blocks[:1]]))
        self._thread = _LastVisit()
        self._last: object = None

    def visit(self, block: B) -> bool:
        """Record that the calling thread visits `block`; return whether no other thread made a visit since its last."""
        thread = self._thread
        last = thread.block
        if last is not None and last is not block:
            self._next[last] = block
        alone, self._last = self._last is last, block
        thread.block = block
        return alone

    def after(self, block: B, most: int) -> list[B]:
        """Return the predicted successors of `block`, at most `most`, each once and without `block` itself."""
        following = self._next.get(block)
        if most == 1:
            return [] if following is None or following is block else [following]
        found: dict[B, None] = {}
        while len(found) < most and following is not None and following is not block and following not in found:
            found[following] = None
            following = self._next.get(following)
        return list(found)


class StreamStats:
    """Transfer counters of one device's weights since the last reset. Thread-safe.

    Attributes:
        bytes_from_ram: Bytes fetched from host memory.
        bytes_from_disk: Bytes fetched from files; for a model that runs on the host, bytes paged in ahead of use.
        bytes_dropped: Bytes whose memory was released to keep the host's budget.
        fetches: Blocks fetched, including prefetches.
        hits: Visits of blocks that had arrived or were being fetched.
        misses: Visits of blocks whose fetch began only then.
        on_host: Of these, experts that the host computed where they lie.
        seconds_waited: Seconds that forwards waited for weights. On devices with streams the device waits for copies,
            and this counts only the waits for the disk.
        seconds_reading: Seconds during which at least one thread read files.
        seconds_on_link: Seconds during which the link copied weights.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            self.bytes_from_ram = 0
            self.bytes_from_disk = 0
            self.bytes_dropped = 0
            self.fetches = 0
            self.hits = 0
            self.misses = 0
            self.on_host = 0
            self.seconds_waited = 0.0
            self.seconds_reading = 0.0
            self.seconds_on_link = 0.0
            self._began = self._reading_since = time.perf_counter()

    def add(
        self,
        *,
        from_ram: int = 0,
        from_disk: int = 0,
        dropped: int = 0,
        waited: float = 0.0,
    ) -> None:
        """Increase counters: bytes from RAM, from disk and dropped, and seconds waited."""
        with self._lock:
            self.bytes_from_ram += from_ram
            self.bytes_from_disk += from_disk
            self.bytes_dropped += dropped
            self.seconds_waited += waited

    def add_fetch(self, from_ram: int = 0) -> None:
        """Count a fetch of so many bytes from RAM."""
        with self._lock:
            self.fetches += 1
            self.bytes_from_ram += from_ram

    def add_link_seconds(self, seconds: float) -> None:
        """Count seconds on the link."""
        with self._lock:
            self.seconds_on_link += seconds

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time within this context as reading; concurrent contexts count once."""
        with self._lock:
            self._readers += 1
            if self._readers == 1:
                self._reading_since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                if self._readers == 0:
                    self.seconds_reading += time.perf_counter() - self._reading_since

    @property
    def hit_rate(self) -> float:
        """Hits as a fraction of all visits; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def link_busy(self) -> float:
        """Fraction of the time since the last reset during which the link was copying."""
        return min(1.0, self.seconds_on_link / max(1e-9, time.perf_counter() - self._began))

    def as_dict(self) -> dict[str, float]:
        """Return the counters by name, with `hit_rate` and `link_busy`."""
        with self._lock:
            counters = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {**counters, "hit_rate": self.hit_rate, "link_busy": self.link_busy}


def together(stats: Sequence[StreamStats]) -> dict[str, float]:
    """Return the sums of the counters of several streamers or readers of one device."""
    found = [each.as_dict() for each in stats]
    total = {name: sum(counters[name] for counters in found) for name in found[0]}
    total["hit_rate"] = total["hits"] / max(1, total["hits"] + total["misses"])
    total["link_busy"] = min(1.0, total["link_busy"])
    return total
