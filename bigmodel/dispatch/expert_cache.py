"""The hot experts of all layers on one device: a fixed number of slots, filled by what routers choose.

acquire(layer, experts):  find the experts in slots, fetch those that are missing, hold them all
release(slots):           let go of them; they stay until their room is needed
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..devices import CopyStream, Event, copy_stream
from .block import Block, HostTensor
from .expert_layer import ExpertLayer
from .expert_policy import ExpertPolicy
from .fetch import Fetcher
from .fused import FusedView
from .stats import StreamStats

Version = tuple[int, int]


@dataclass(eq=False)
class ExpertSlot:
    """Room for one expert. `marks` are the computations that must end before it may be overwritten."""

    number: int
    slab: torch.Tensor
    content: tuple[int, int] | None = None
    version: Version = (0, 0)
    ready: Event | None = None
    marks: list[Event] = field(default_factory=list)


class ExpertCache:
    """Experts of equal size on one device.

    Args:
        device: Where they run.
        layers: The layers, in the order in which the model runs them, all of one signature.
        nbytes: Device memory that the cache may take, in bytes. It has at least one slot, and none more than experts.
    """

    def __init__(self, device: torch.device, layers: Sequence[ExpertLayer], nbytes: int) -> None:
        self.device = device
        self.layers = list(layers)
        size = self.layers[0].layout.nbytes
        self.slots = max(1, min(nbytes // max(1, size), sum(layer.experts for layer in self.layers)))
        memory = torch.empty(self.slots, size, dtype=torch.uint8, device=device)
        self.rows = self.layers[0].rows(memory)
        self.nbytes = memory.nbytes
        self._number = {layer: number for number, layer in enumerate(self.layers)}
        self._policy = ExpertPolicy(len(self.layers), max(layer.experts for layer in self.layers))
        self._slots = [ExpertSlot(number, memory[number]) for number in range(self.slots)]
        self._start()

    def _start(self) -> None:
        """Make what belongs to one process: threads, their locks, and what they are in the middle of."""
        self._process = os.getpid()
        self._changed = threading.Condition()
        self.stats = StreamStats()
        self._stream: CopyStream = copy_stream(self.device)
        self._fetcher = Fetcher(self._stream, self.device, self.stats, [_as_block(layer) for layer in self.layers])
        self._slot_of: dict[tuple[int, int], ExpertSlot] = {}
        self._contents = np.full((2, self.slots), -1)
        self._users = np.zeros(self.slots, dtype=np.int64)
        for slot in self._slots:
            slot.content, slot.ready, slot.marks = None, None, []

    def following(self, layer: ExpertLayer) -> ExpertLayer:
        """Return the layer that runs after `layer`; after the last, the first."""
        return self.layers[(self._number[layer] + 1) % len(self.layers)]

    def visit(self, layer: ExpertLayer, chosen: Sequence[int]) -> None:
        """Note which experts a layer's router chose: what is kept depends on it."""
        if self._process != os.getpid():
            # After a fork: nothing that was on its way will arrive, and the threads are not here.
            self._start()
        with self._changed:
            self._policy.visit(self._number[layer], chosen)
            found = sum((self._number[layer], expert) in self._slot_of for expert in chosen)
            self.stats.hits += found
            self.stats.misses += len(chosen) - found

    def acquire(
        self, layer: ExpertLayer, experts: Sequence[int], wait: bool = True, soon: Iterable[int] = ()
    ) -> list[int] | None:
        """Bring experts of one layer to the device and hold them; return their slots.

        All are taken at once or none, so that two threads never wait for each other's.

        Args:
            layer: Whose experts.
            experts: At most as many as there are slots, none twice.
            wait: Wait until the room is free and the experts have arrived. Otherwise None is returned when the room is
                not free, and `await_arrival` remains to be called.
            soon: Experts of this layer that are wanted next; they are overwritten last.

        Raises:
            Exception: Whatever a fetch raised; nothing is held then.
        """
        with self._changed:
            slots = self._take(layer, experts, soon)
            while slots is None:
                if not wait:
                    return None
                self._changed.wait()
                slots = self._take(layer, experts, soon)
        numbers = [slot.number for slot in slots]
        if wait:
            self.await_arrival(numbers)
        return numbers

    def await_arrival(self, slots: Sequence[int]) -> None:
        """Make what the calling thread computes from now on come after the fetches into `slots`, which it holds.

        Raises:
            Exception: Whatever a fetch raised; the slots are not held any more then.
        """
        started = time.perf_counter()
        try:
            for number in slots:
                ready = self._slots[number].ready
                assert ready is not None
                ready.wait()
        except BaseException:
            self._give_up(slots)
            raise
        self.stats.add(waited=time.perf_counter() - started)

    def _give_up(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._users[list(slots)] -= 1
            for slot in (self._slots[number] for number in slots):
                # Unless the wait was interrupted and the fetch goes on: then its content is still to come.
                if not self._users[slot.number] and slot.ready is not None and slot.ready.done():
                    self._forget(slot)
            self._changed.notify_all()

    def release(self, slots: Sequence[int]) -> None:
        """Let go of slots; what the calling thread computes on them ends before they are overwritten."""
        mark = self._stream.compute_mark()
        with self._changed:
            for slot in (self._slots[number] for number in slots):
                slot.marks = [m for m in slot.marks if not m.done()]
                slot.marks.append(mark)
            self._users[list(slots)] -= 1
            self._changed.notify_all()

    def fetch_ahead(self, layer: ExpertLayer, experts: Sequence[int]) -> None:
        """Start fetching experts that are likely to be wanted next, as far as there is room that nobody uses."""
        with self._changed:
            free = self.slots - int(np.count_nonzero(self._users))
            slots = self._take(layer, experts[:free], ())
            if slots is not None:
                self._users[[slot.number for slot in slots]] -= 1

    def _take(self, layer: ExpertLayer, experts: Sequence[int], soon: Iterable[int]) -> list[ExpertSlot] | None:
        """Hold slots for `experts`, starting the fetches of those that are missing; None if they do not all fit."""
        number, version = self._number[layer], layer.version()
        present = {expert: slot for expert in experts if (slot := self._find(number, expert, version)) is not None}
        missing = [expert for expert in experts if expert not in present]
        later = [self._slot_of[number, expert].number for expert in soon if (number, expert) in self._slot_of]
        victims = self._victims(len(missing), [slot.number for slot in present.values()], later)
        if victims is None:
            return None
        for expert, victim in zip(missing, victims):
            present[expert] = self._slots[victim]
            self._fetch(layer, expert, version, self._slots[victim])
        slots = [present[expert] for expert in experts]
        self._users[[slot.number for slot in slots]] += 1
        return slots

    def _find(self, layer: int, expert: int, version: Version) -> ExpertSlot | None:
        """Return the slot of an expert, if it is there and the host's tensors have not changed since."""
        slot = self._slot_of.get((layer, expert))
        if slot is not None and slot.version != version and not self._users[slot.number]:
            self._forget(slot)
            return None
        return slot

    def _victims(self, count: int, keep: list[int], later: list[int]) -> list[int] | None:
        """Return the numbers of `count` slots to overwrite: none in use or in `keep`, those in `later` last of all;
        None if there are not so many."""
        if not count:
            return []
        waits = self._policy.waits(self._contents[0], self._contents[1])
        waits[self._contents[0] < 0] = np.inf
        waits[later] = 0.0
        waits[self._users > 0] = -np.inf
        waits[keep] = -np.inf
        longest = np.argsort(-waits, kind="stable")[:count]
        if len(longest) < count or waits[longest[-1]] == -np.inf:
            return None
        return [int(number) for number in longest]

    def _fetch(self, layer: ExpertLayer, expert: int, version: Version, slot: ExpertSlot) -> None:
        self._forget(slot)
        slot.ready = self._fetcher.fetch(layer.block(expert), slot.slab, slot.marks)
        slot.content, slot.version, slot.marks = (self._number[layer], expert), version, []
        self._contents[:, slot.number] = slot.content
        self._slot_of[slot.content] = slot

    def _forget(self, slot: ExpertSlot) -> None:
        if slot.content is not None:
            self._slot_of.pop(slot.content, None)
        slot.content = None
        self._contents[:, slot.number] = -1


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


def _as_block(layer: ExpertLayer) -> Block:
    """Return all experts of a layer as one block of plain tensors."""
    tensors = []
    for fused in layer.fused.tensors:
        value = fused.value.detach()
        values = [part.value for part in value.parts] if isinstance(value, FusedView) else [value]
        tensors += [HostTensor(plain, fused.device_dtype) for plain in values]
    return Block(layer.name, tensors)
