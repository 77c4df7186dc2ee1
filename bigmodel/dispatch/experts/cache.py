"""The expert cache: a fixed number of slots on one device, filled by what the routers of all layers choose.

acquire(layer, experts, held):  find the experts in slots, fetch those that are missing, hold them all
release(held):                  let go of them; they stay until their room is needed

Slots are held by number, in a list that a visit of the cache begins with: see `Visited`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ...devices import CopyStream, copy_stream
from ...limits import READERS, STAGING_BYTES
from ..transfer.fetcher import Fetcher
from ..weights.stats import StreamStats
from ..weights.visits import Visited
from .layer import ExpertLayer
from .policy import ExpertPolicy
from .slots import ExpertSlot, ExpertSlots


class Chosen(NamedTuple):
    """What a visit of the cache asks for: at most as many experts of a layer as there are slots, none twice.

    Attributes:
        layer: Whose experts.
        experts: Their numbers.
        soon: Experts of this layer that are wanted next; they are overwritten last.
    """

    layer: ExpertLayer
    experts: Sequence[int]
    soon: Iterable[int] = ()


class ExpertCache(Visited[Chosen, int]):
    """Experts of equal size on one device. A visit holds the numbers of their slots, in their order.

    Args:
        device: Where they run.
        layers: The layers, in the order in which the model runs them, all of one signature.
        slots: How many experts there is room for; at least one, and no more than there are.
        staging_bytes: Host memory through which experts on disk reach the device, at most.
        readers: How many threads read them.
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
        self._fetcher = Fetcher(
            self._stream, self.device, self.stats, [layer.as_plain_block() for layer in self.layers], *self._reading
        )
        self._slots = ExpertSlots(self._memory, self._policy, self._stream.compute_mark())

    @property
    def in_use(self) -> int:
        """Slots whose content forwards of this process run on now, or wait for."""
        return self.slots - self._slots.free if self.is_started else 0

    def following(self, layer: ExpertLayer) -> ExpertLayer:
        """Return the layer that runs after `layer`; after the last, the first."""
        return self.layers[(self._number[layer] + 1) % len(self.layers)]

    def record(self, layer: ExpertLayer, chosen: Sequence[int]) -> None:
        """Note which experts a layer's router chose: what is kept depends on it."""
        if not self.is_started:
            self.start()
        with self._lock:
            self._policy.visit(self._number[layer], chosen)
            found = sum((self._number[layer], expert) in self._slots for expert in chosen)
            self.stats.hits += found
            self.stats.misses += len(chosen) - found

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
        """Bring experts of one layer to the device and hold them; return whether they are held.

        All are taken at once or none, so that two threads never wait for each other's.

        Args:
            layer: Whose experts.
            experts: At most as many as there are slots, none twice.
            held: The numbers of their slots are appended, in their order.
            wait: Wait until the room is free and the experts have arrived. Otherwise nothing is held when the room is
                not free, and `await_arrival` remains to be called.
            soon: Experts of this layer that are wanted next; they are overwritten last.

        Raises:
            Exception: Whatever a fetch raised; nothing is held then.
        """
        with self._lock:
            slots = self._bring(layer, experts, soon)
            while slots is None:
                if not wait:
                    return False
                self._changed.wait()
                slots = self._bring(layer, experts, soon)
            numbers = [slot.number for slot in slots]
            self._slots.users[numbers] += 1
            held += numbers
        if wait:
            self.await_arrival(held)
        return True

    def await_arrival(self, held: list[int]) -> None:
        """Make what the calling thread computes from now on come after the fetches into the slots it holds.

        Raises:
            Exception: Whatever a fetch raised; the slots are not held any more then.
        """
        started = time.perf_counter()
        try:
            for number in held:
                ready = self._slots[number].ready
                assert ready is not None
                ready.wait()
        except BaseException:
            self._give_up(held)
            raise
        self.stats.add(waited=time.perf_counter() - started)

    def _give_up(self, held: list[int]) -> None:
        with self._lock:
            slots = [self._slots[number] for number in held]
            self._slots.users[held] -= 1
            del held[:]
            for slot in slots:
                # Unless the wait was interrupted and the fetch goes on: then its content is still to come.
                if not self._slots.users[slot.number] and slot.ready is not None and slot.ready.done():
                    self._slots.forget(slot)
            self._changed.notify_all()

    def release(self, held: list[int], count: int | None = None) -> None:
        """Let go of the first `count` slots held; what the calling thread computes on them ends before they are
        overwritten. None: of all."""
        mark = self._stream.compute_mark()
        with self._lock:
            numbers = held[:count]
            for number in numbers:
                self._slots[number].mark(mark)
            self._slots.users[numbers] -= 1
            del held[:count]
            self._changed.notify_all()

    def fetch_ahead(self, layer: ExpertLayer, experts: Sequence[int]) -> None:
        """Start fetching experts that are likely to be wanted next, as far as there is room that nobody uses."""
        with self._lock:
            self._bring(layer, experts[: self._slots.free], ())

    def _bring(self, layer: ExpertLayer, experts: Sequence[int], soon: Iterable[int]) -> list[ExpertSlot] | None:
        """Return slots for `experts`, starting the fetches of those that are missing; None if they do not all fit."""
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
    """Return by device what its caches did: hits, misses, fetches, bytes fetched from RAM and disk, seconds waited,
    the share of chosen experts that were hits, and the bytes the caches take."""
    counted: dict[str, dict[str, float]] = {}
    for cache in caches:
        stats = cache.stats.as_dict()
        here = counted.setdefault(str(cache.device), defaultdict(float))
        for name in ("hits", "misses", "fetches", "bytes_from_ram", "bytes_from_disk", "seconds_waited"):
            here[name] += stats[name]
        here["bytes_fetched"] += stats["bytes_from_ram"] + stats["bytes_from_disk"]
        here["cache_bytes"] += cache.nbytes
        here["hit_rate"] = here["hits"] / max(1, here["hits"] + here["misses"])
    return {device: dict(counters) for device, counters in counted.items()}
