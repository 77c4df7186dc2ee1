"""Pages of some layers on the host, which accelerators read through slots that are filled ahead of use.

    store:  queue the copies of a layer's new keys and values to their pages, behind the compute that makes them
    read:   start fetching what a step reads of the layer that comes next into another slot; wait until that of this one
            has arrived; put the step's own rows in their places there

The slots of each accelerator, and the order of copies, are in :mod:`.page_link`. Where RAM does not hold all pages,
older ones are in a file (:mod:`.tiers`), from which they are read on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq

import torch

from bigmodel.devices import HOST
from bigmodel.dispatch.weights.visits import StreamStats
from bigmodel.server.engine.kv.page_link import PageLink
from bigmodel.server.engine.kv.reading import StepReadings, consecutive
from bigmodel.server.engine.kv.tiers import PageTiers


class HostPages:
    """Pages of some layers of an arena, on the host.

    Args:
        positions: Of all pages.
        layers: Indices of the layers.
        slots: Layers with memory on an accelerator at once.
        allocate: Returns host memory of a number of bytes.
        tiers: Which of them are in RAM and which in a file; None: RAM has all.
    """

    def __init__(
        self,
        positions: int,
        layers: Collection[int],
        slots: int,
        allocate: Callable[[int], torch.Tensor],
        tiers: PageTiers | None = None,
    ) -> None:
        self.layers = frozenset(layers)
        self.stats = StreamStats()
        self.tiers = tiers
        self._positions = positions
        self._slots = slots
        self._allocate = allocate
        self._pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {} if tiers is None else tiers.frames
        self._links: dict[torch.device, PageLink] = {}

    def written(self) -> Seq[int]:
        """Indices of the layers written so far."""
        return list(self._pages)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What RAM has of layer ``index`` [positions, key-value heads, dim], once all copies have arrived."""
        for link in self._links.values():
            link.synchronize()
        return self._pages[index]

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [positions, key-value heads, dim] of the positions ``rows``, copied on the host."""
        keys, values = self.layer(layer)
        if self.tiers is not None:
            return self.tiers.gather(layer, rows)
        return keys[rows], values[rows]

    def gone(self, page: int) -> None:
        """Note that nobody holds a page any more."""
        if self.tiers is not None:
            self.tiers.gone(page)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that they take."""
        return sum(each.nbytes for held in list(self._pages.values()) for each in held)

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` [tokens, key-value heads, dim] at the positions ``rows`` at once."""
        self._make(layer, key, value)
        for link in self._links.values():
            link.outdate()
        pages, at, new = self.layer(layer), rows.to(HOST), (key.to(HOST), value.to(HOST))
        if self.tiers is not None:
            self.tiers.write(layer, at, new)
            return
        for held, each in zip(pages, new, strict=True):
            held.index_copy_(0, at, each)

    def store(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Queue the copies of ``key`` and ``value`` to the positions ``rows``, on the host; `read` puts them in their
        places beside what has been there."""
        self._make(layer, key, value)
        if key.device not in self._links:
            self._links[key.device] = self._new_link(key.device)
        at = rows if self.tiers is None else self.tiers.placed(rows)
        self._links[key.device].store(layer, consecutive(at), self._pages[layer], (key, value))

    def read(
        self, step: StepReadings, layer: int, window: int | None, number: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [positions read, key-value heads, dim] of layer ``layer`` on ``device``, in memory
        that stays as it is until the next call.

        Args:
            step: What the step reads.
            layer: The layer that was stored last.
            window: Its window.
            number: Which of its readings.
            device: Where the layer runs.
        """
        with torch.inference_mode(False), torch.no_grad():  # slots are ordinary memory, whatever reads them
            return self._links[device].read(step, layer, window, number)

    def begin(self, written: torch.Tensor, read: torch.Tensor, step: StepReadings) -> None:
        """Start copying what a step reads first, as far as that is known from an earlier one, which may have started.

        Args:
            written: Positions that it writes to.
            read: Pages that it reads.
            step: What its layers read.

        Raises:
            KVDiskError: There is no memory for the step without the disk, which fails.
        """
        if self.tiers is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.tiers.prepare(written, read, lambda: [link.mark() for link in self._links.values()])
        for link in self._links.values():
            link.begin(step)

    def _new_link(self, device: torch.device) -> PageLink:
        older = None if self.tiers is None else self.tiers.older
        return PageLink(device, self._slots, self._positions, self.stats, older, self._pages, self._spans)

    def _spans(self, layer: int, which: int, begin: int, end: int) -> Iterable[tuple[bool, torch.Tensor]]:
        """Keys (0) or values (1) of the positions ``begin`` to ``end``: whether RAM has them, and a view."""
        if self.tiers is None:
            return [(True, self._pages[layer][which][begin:end])]
        return self.tiers.spans(layer, which, begin, end)

    def _make(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if layer not in self._pages:
            with torch.inference_mode(False), torch.no_grad():
                made = [self._new(like) for like in (key, value)]
                self._pages[layer] = made[0], made[1]

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        shape = self._positions if self.tiers is None else self.tiers.positions, like.shape[1], like.shape[2]
        nbytes = shape[0] * shape[1] * shape[2] * like.element_size()
        return self._allocate(nbytes).view(like.dtype).view(shape)
