"""Arenas whose pages lie on the host, and steps that write to them and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bigmodel.devices.pinned import empty_weights
from bigmodel.dispatch.streaming.host_kv import OlderRows
from bigmodel.dispatch.streaming.kv_file import KVDisk
from bigmodel.plan import StagingMemory
from bigmodel.server.engine.compute.attention import RaggedCache, Span
from bigmodel.server.engine.kv.arena import KVArena
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK
from bigmodel.server.engine.kv.host_pages import HostPages
from bigmodel.server.engine.kv.tiers import PageTiers
from tests.accelerators import at

B = PROMPT_BLOCK
LAYERS, HEADS, DIM = 3, 2, 4


def on_host(pages: int, layers: Any = range(LAYERS), slots: int = 2, tiers: PageTiers | None = None) -> KVArena:
    return KVArena(pages * B, HostPages(pages * B, layers, slots, lambda nbytes: empty_weights(nbytes, True), tiers))


def on_disk(folder: Path, pages: int, frames: int, layers: Any = range(LAYERS), slots: int = 2) -> KVArena:
    """An arena whose RAM has memory for a number of pages."""
    older = OlderRows(KVDisk(folder, 1 << 20), 1, {torch.device(at(0)): StagingMemory(8192, 4)}, 2)
    return on_host(pages, layers, slots, PageTiers(pages, frames, layers, 2 * HEADS * DIM * 4, older))


def step(arena: KVArena, spans: list[Span], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Write random keys and values of every layer; return what attention reads of each."""
    cache, found, device = RaggedCache(spans), [], torch.device(at(0))
    cache.begin()
    tokens = sum(span.end - span.start for span in spans)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        key, value = (torch.randn(1, HEADS, tokens, DIM, generator=generator).to(device) for _ in range(2))
        with torch.inference_mode():
            cache.update(key, value, layer)
            for number, calls in enumerate(cache.step(device, None).calls):
                host = arena.on_host(layer)
                if host is None:
                    read = tuple(each.index_select(0, calls.gathered) for each in arena.layer(layer))
                else:
                    read = host.read(cache, layer, None, number, device)
                found.append((read[0].cpu(), read[1].cpu()))
    return found
