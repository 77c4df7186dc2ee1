"""Keys and values in pages of one arena, for accelerators: what grows never moves, and nothing fragments.

An arena holds, for each layer, all positions that the engine may use, allocated once: exactly the bytes that the plan
counts. A sequence holds pages of :data:`~bigmodel.server.engine.kv.buffers.PROMPT_BLOCK` positions, the same in every
layer. Cached prefixes share pages with the sequences that begin with them: whole prompt blocks are never written again.
Pages of some layers may lie on the host (:mod:`.host_pages`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from bigmodel.devices.pinned import on_device
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK, SequenceKV
from bigmodel.server.engine.kv.host_pages import HostPages


class Page:
    """One page of an arena, held by sequences and cached prefixes. The last one that lets go of it frees it."""

    def __init__(self, arena: KVArena, number: int) -> None:
        self.number = number
        self._arena = arena

    def __del__(self) -> None:
        if self._arena.host is not None:
            self._arena.host.gone(self.number)
        self._arena.free.append(self.number)

    def layers(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The page's keys and values [key-value heads, PROMPT_BLOCK, dim], by layer."""
        begin, end = self.number * PROMPT_BLOCK, (self.number + 1) * PROMPT_BLOCK
        held = {layer: self._arena.span(layer, begin, end) for layer in self._arena.layers()}
        return {layer: (k.transpose(0, 1), v.transpose(0, 1)) for layer, (k, v) in held.items()}


class KVArena:
    """Pages for ``capacity`` positions, a multiple of PROMPT_BLOCK; memory of a layer is allocated at its first write.

    ``free`` lists the numbers of pages that nobody holds. ``host`` has the pages of the layers that it names.
    """

    def __init__(self, capacity: int, host: HostPages | None = None) -> None:
        self.pages = capacity // PROMPT_BLOCK
        self.host = host
        self.free = list(range(self.pages - 1, -1, -1))
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def positions(self) -> int:
        """Positions of all pages."""
        return self.pages * PROMPT_BLOCK

    def page(self) -> Page:
        """A page that nobody holds. Raises RuntimeError when there is none: the token pool must be asked before."""
        if not self.free:
            raise RuntimeError(f"all {self.pages} pages of keys and values are held")
        return Page(self, self.free.pop())

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer ``index`` [positions of all pages, key-value heads, dim]; of one on the host those
        that are in RAM."""
        host = self.on_host(index)
        return self._layers[index] if host is None else host.layer(index)

    def span(self, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of consecutive positions, copied on the host or views on an accelerator."""
        host = self.on_host(layer)
        if host is not None:
            return host.gather(layer, torch.arange(begin, end))
        keys, values = self._layers[layer]
        return keys[begin:end], values[begin:end]

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values of the positions ``rows``, on the host, where the layer's are."""
        host = self.on_host(layer)
        if host is not None:
            return host.gather(layer, rows)
        keys, values = self._layers[layer]
        at = on_device(rows, keys.device)
        return keys[at], values[at]

    def layers(self) -> Seq[int]:
        """Indices of the layers written so far."""
        return sorted([*self._layers, *([] if self.host is None else self.host.written())])

    def on_host(self, layer: int) -> HostPages | None:
        """The pages on the host, if those of layer ``layer`` are there."""
        return self.host if self.host is not None and layer in self.host.layers else None

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` [tokens, key-value heads, dim] at the positions ``rows`` of the arena."""
        host = self.on_host(layer)
        if host is not None:
            host.write(layer, rows, key, value)
            return
        if layer not in self._layers:
            self._layers[layer] = self._allocated(key), self._allocated(value)
        keys, values = self._layers[layer]
        keys.index_copy_(0, rows, key)
        values.index_copy_(0, rows, value)

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):  # blocks of files are written to it outside of steps
            return like.new_empty(self.pages * PROMPT_BLOCK, like.shape[1], like.shape[2])


class PagedKV(SequenceKV):
    """Keys and values of one sequence in pages of an arena."""

    def __init__(self, arena: KVArena) -> None:
        super().__init__()
        self.arena = arena
        self.pages: list[Page] = []
        self._rows = torch.empty(0, dtype=torch.long)

    def reserve(self, capacity: int) -> None:
        """Take pages for up to ``capacity`` positions."""
        while len(self.pages) * PROMPT_BLOCK < capacity:
            self.pages.append(self.arena.page())
        self.capacity = max(self.capacity, capacity)
        self._find_rows()

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Positions of the arena, on the host, at which positions ``start`` to ``end`` of the sequence are.

        Raises RuntimeError where they are not reserved.
        """
        if end > self.capacity:
            raise RuntimeError(f"position {end} is past the {self.capacity} positions reserved")
        return self._rows[start:end]

    def numbers(self, end: int) -> torch.Tensor:
        """Numbers of the pages of positions up to ``end``."""
        return self._rows[:end:PROMPT_BLOCK] // PROMPT_BLOCK

    def _find_rows(self) -> None:
        begins = torch.tensor([page.number * PROMPT_BLOCK for page in self.pages])
        self._rows = (begins[:, None] + torch.arange(PROMPT_BLOCK)).reshape(-1)

    def layers(self) -> Seq[int]:
        """Indices of the layers written so far."""
        return self.arena.layers()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of what layer ``index`` holds, in the form of the contiguous buffers."""
        return self.span(index, 0, self.capacity)

    def span(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [key-value heads, positions, dim] of positions ``start`` to ``end``, gathered from pages."""
        keys, values = self.arena.gather(layer, self.rows(start, end))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key`` and ``value`` [key-value heads, tokens, dim] at positions from ``start`` on."""
        rows = on_device(self.rows(start, start + key.shape[1]), key.device)
        self.arena.write(layer, rows, key.transpose(0, 1), value.transpose(0, 1))

    def cut(self, index: int) -> Page:
        """The page of prompt block ``index``."""
        return self.pages[index]

    def put(self, index: int, block: object) -> None:
        """Hold ``block``, a page of a cached prefix, as prompt block ``index``, in the place of the own page."""
        assert isinstance(block, Page)
        self.pages[index] = block
        self._find_rows()
