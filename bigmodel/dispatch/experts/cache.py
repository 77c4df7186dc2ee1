"""The expert cache: a fixed number of slots on one device for the experts that routers choose.

acquire(layer, experts, held):  find the experts in slots, fetch the missing ones, and hold their slots
release(held):                  stop holding the slots; the experts stay until their slots are reused

Slots are held by number, in a list that belongs to a visit of the cache: see `Visited`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ...devices import CopyStream, copy_stream
from ...limits import READERS, STAGING_BYTES
from ...plan.result.expert_split import ExpertSplit
from ..transfer.fetcher import Fetcher
from ..weights.visits import StreamStats, Visited
from .layer import ExpertLayer
from .policy import ExpertPolicy
from .slots import ExpertSlot, ExpertSlots


class Chosen(NamedTuple):
    """The request of a visit: distinct experts of one layer, at most as many as there are slots.

    Attributes:
        layer: The layer of the experts.
        experts: Their numbers.
        soon: Experts of this layer that are needed next; they are evicted last.
    """

    layer: ExpertLayer
    experts: Sequence[int]
    soon: Iterable[int] = ()


class ExpertCache(Visited[Chosen, int]):
    """A cache of equally large experts on one device. A visit holds the numbers of their slots, in their order.

    Args:
        device: Execution device.
        layers: The layers, in the order in which the model runs them, all of one signature.
        slots: Experts that fit at once; clamped to 1 ... the number of experts.
        staging_bytes: Limit of the host memory through which experts on disk reach the device.
        readers: Number of threads that read them.
    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[ExpertLayer],
        slots: int,
        staging_bytes: int = STAGING_BYTES,
        readers: int = READERS,
    ) -> None:
        self.device = device
        self.layers = list(layers)
        size = self.layers[0].layout.nbytes
        self.slots = max(1, min(slots, sum(layer.experts for layer in self.layers)))
        self._reading = staging_bytes, readers
        self._memory = torch.empty(self.slots, size, dtype=torch.uint8, device=device)
        self.rows = self.layers[0].rows(self._memory)
        self.nbytes = self._memory.nbytes
        self._number = {layer: number for number, layer in enumerate(self.layers)}
        self._policy = ExpertPolicy(len(self.layers), max(layer.experts for layer in self.layers))
        self.start()

    def _start(self) -> None:
        super()._start()
        self.stats = StreamStats()
        self._stream: CopyStream = copy_stream(self.device)
        blocks = [layer.as_plain_block() for layer in self.layers]
        parts = [layer.expert_bytes for layer in self.layers if layer.on_disk for _ in range(layer.experts)]
        self._fetcher = Fetcher(self._stream, self.device, self.stats, blocks, *self._reading, parts=parts)
        self._fetcher.uses(self._memory)
        self._slots = ExpertSlots(self._memory, self._policy, self._stream.compute_mark())

    @property
    def share(self) -> float:
        """The share of all experts that the cache holds."""
        return self.slots / sum(layer.experts for layer in self.layers)

    @property
    def in_use(self) -> int:
        """Slots that forwards of this process compute with or wait for."""
        return self.slots - self._slots.free if self.is_started else 0

    def following(self, layer: ExpertLayer) -> ExpertLayer:
        """Return the layer that runs after `layer`; after the last, the first."""
        return self.layers[(self._number[layer] + 1) % len(self.layers)]

    def record(self, layer: ExpertLayer, chosen: Sequence[int]) -> None:
        """Record which experts a layer's router chose, for the eviction policy and the counters."""
        if not self.is_started:
            self.start()
        with self._lock:
            self._policy.visit(self._number[layer], chosen)
            found = sum((self._number[layer], expert) in self._slots for expert in chosen)
            self.stats.hits += found
            self.stats.misses += len(chosen) - found

    def divide(self, layer: ExpertLayer, chosen: Sequence[int], split: ExpertSplit) -> tuple[list[int], list[int]]:
        """Return the chosen experts that are not in slots: those to be fetched, and those that the host computes.

        Fetched are those whose next use is expected first; all, while as many slots are empty.
        """
        number, version = self._number[layer], layer.version()
        with self._lock:
            missing = [each for each in chosen if self._slots.find((number, each), version) is None]
            missing.sort(key=lambda each: self._policy.wait(number, each))
            on_host = 0 if len(missing) <= self._slots.empty else split.on_host(len(missing))
            fetched = len(missing) - on_host
            self.stats.on_host += on_host
        return sorted(missing[:fetched]), sorted(missing[fetched:])

    def _enter(self, request: Chosen, held: list[int]) -> None:
        self.acquire(request.layer, request.experts, held, soon=request.soon)

    def _leave(self, held: list[int]) -> None:
        self.release(held)

    def acquire(
        self,
        layer: ExpertLayer,
        experts: Sequence[int],
        held: list[int],
        wait: bool = True,
        soon: Iterable[int] = (),
    ) -> bool:
        """Fetch experts of one layer and hold their slots; return whether they are held.

        All slots are acquired at once or none, so that two threads cannot deadlock.

        Args:
            layer: The layer of the experts.
            experts: Distinct experts, at most as many as there are slots.
            held: The numbers of their slots are appended, in their order.
            wait: Wait until slots are free and the experts have arrived. Otherwise return False if slots are not free;
                if they are, the caller must call `await_arrival` before it computes with them.
            soon: Experts of this layer that are needed next; they are evicted last.

        Raises:
            Exception: The error of a fetch; nothing is held then.
        """
        with self._lock:
            slots = self._fetch_missing(layer, experts, soon)
            while slots is None:
                if not wait:
                    return False
                self._changed.wait()
                slots = self._fetch_missing(layer, experts, soon)
            numbers = [slot.number for slot in slots]
            self._slots.users[numbers] += 1
            held += numbers
        if wait:
            self.await_arrival(held)
        return True

    def await_arrival(self, held: list[int]) -> None:
        """Order all later compute of the calling thread after the fetches into the slots it holds.

        Raises:
            Exception: The error of a fetch; the slots are no longer held then.
        """
        started = time.perf_counter()
        try:
            for number in held:
                ready = self._slots[number].ready
                assert ready is not None
                ready.wait()
        except BaseException:
            self._release_failed(held)
            raise
        self.stats.add(waited=time.perf_counter() - started)

    def _release_failed(self, held: list[int]) -> None:
        with self._lock:
            slots = [self._slots[number] for number in held]
            self._slots.users[held] -= 1
            del held[:]
            for slot in slots:
                # After an interrupted wait the fetch may still be running; then the slot's content is valid later.
                if not self._slots.users[slot.number] and slot.ready is not None and slot.ready.done():
                    self._slots.forget(slot)
            self._changed.notify_all()

    def release(self, held: list[int], count: int | None = None) -> None:
        """Stop holding the first `count` slots of `held` (None: all). They are not overwritten before the compute that
        the calling thread has launched has finished."""
        mark = self._stream.compute_mark()
        with self._lock:
            numbers = held[:count]
            for number in numbers:
                self._slots[number].mark(mark)
            self._slots.users[numbers] -= 1
            del held[:count]
            self._changed.notify_all()

    def fetch_ahead(self, layer: ExpertLayer, experts: Sequence[int]) -> None:
        """Start fetching experts that are likely to be needed next, into slots that are not in use."""
        with self._lock:
            self._fetch_missing(layer, experts[: self._slots.free], ())

    def _fetch_missing(
        self, layer: ExpertLayer, experts: Sequence[int], soon: Iterable[int]
    ) -> list[ExpertSlot] | None:
        """Return slots for `experts`, after starting the fetches of missing ones; None if they do not all fit."""
        number, version = self._number[layer], layer.version()
        found = {expert: self._slots.find((number, expert), version) for expert in experts}
        present = {expert: slot for expert, slot in found.items() if slot is not None}
        missing = [expert for expert in experts if expert not in present]
        overwritten = self._slots.overwritable(len(missing), present.values(), [(number, expert) for expert in soon])
        if overwritten is None:
            return None
        for expert, slot in zip(missing, overwritten):
            self._fetch(layer, expert, version, slot)
            present[expert] = slot
        return [present[expert] for expert in experts]

    def _fetch(self, layer: ExpertLayer, expert: int, version: object, slot: ExpertSlot) -> None:
        key, block = (self._number[layer], expert), layer.block(expert)
        self._slots.fill(slot, key, version, lambda memory, after: self._fetcher.fetch(block, memory, after))
        self._slots.placed(key, slot)


def expert_stats(caches: Iterable[ExpertCache]) -> dict[str, dict[str, float]]:
    """Return counters of expert caches by device: hits, misses, those of them that the host computed, hit rate,
    fetches, bytes fetched from RAM and disk, seconds waited, bytes of device memory, and reuse: the share of chosen
    experts that routers' habits had in the cache, beyond the share of all experts that it holds."""
    counted: dict[str, dict[str, float]] = {}
    by_chance: dict[str, float] = defaultdict(float)
    for cache in caches:
        stats = cache.stats.as_dict()
        here = counted.setdefault(str(cache.device), defaultdict(float))
        for name in ("hits", "misses", "on_host", "fetches", "bytes_from_ram", "bytes_from_disk", "seconds_waited"):
            here[name] += stats[name]
        here["bytes_fetched"] += stats["bytes_from_ram"] + stats["bytes_from_disk"]
        here["cache_bytes"] += cache.nbytes
        here["hit_rate"] = here["hits"] / max(1, here["hits"] + here["misses"])
        by_chance[str(cache.device)] += (stats["hits"] + stats["misses"]) * cache.share
    for device, here in counted.items():
        apart = here["hits"] + here["misses"] - by_chance[device]
        here["reuse"] = max((here["hits"] - by_chance[device]) / apart, 0.0) if apart > 0 else 0.0
    return {device: dict(counters) for device, counters in counted.items()}
