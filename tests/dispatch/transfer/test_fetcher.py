"""Blocks in memory and on disk, side by side in the slots of one streamer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from bigmodel.dispatch.streaming.streamer import Streamer
from bigmodel.dispatch.weights.block import Block, HostTensor
from bigmodel.errors import CheckpointFormatError

from ...accelerators import at
from ..mapped_files import Registry, streamed_blocks

pytestmark = pytest.mark.usefixtures("every_accelerator")


def mixed_blocks(folder: Path, count: int = 6, elements: int = 3000) -> tuple[list[Block], list[Registry]]:
    """Return blocks of which every second is in memory and the others are on disk, block n holding the number n."""
    blocks, registries = streamed_blocks(folder, count, elements)
    for n in range(0, count, 2):
        registries[n]["weight"] = torch.full((elements,), float(n))
        blocks[n] = Block(str(n), [HostTensor(registries[n]["weight"], torch.float32, [(registries[n], "weight")])])
    return blocks, registries


def streamer_of(blocks: list[Block]) -> Streamer:
    return Streamer(torch.device(at(0)), blocks)


def seen(streamer: Streamer, block: Block, registry: Registry) -> list[float]:
    with streamer.use(block):
        values: list[float] = registry["weight"].cpu().unique().tolist()
    return values


def test_blocks_arrive_from_wherever_they_are(tmp_path: Path) -> None:
    blocks, registries = mixed_blocks(tmp_path)
    streamer = streamer_of(blocks)
    for _ in range(3):
        for n, block in enumerate(blocks):
            assert seen(streamer, block, registries[n]) == [n]
    assert streamer.stats.bytes_from_ram > 0
    assert streamer.stats.bytes_from_disk > 0
    assert streamer.stats.seconds_on_link > 0


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 3, 5])
def test_wrong_guesses_never_mix_slots_up(tmp_path: Path, step: int) -> None:
    """A fetch from memory into a slot must not be overtaken by an older one from disk into the same slot."""
    blocks, registries = mixed_blocks(tmp_path, count=7, elements=50_000)
    streamer = streamer_of(blocks)
    for visit in range(60):
        n = visit * step % 7
        assert seen(streamer, blocks[n], registries[n]) == [n]


def test_a_fetch_that_fails_fails_the_forward_that_needs_it_and_nothing_else(tmp_path: Path) -> None:
    blocks, registries = streamed_blocks(tmp_path, count=4, elements=3000)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    streamer = streamer_of(blocks)
    for _ in range(2):
        for n in range(3):
            assert seen(streamer, blocks[n], registries[n]) == [n]
        host = registries[3]["weight"]
        with pytest.raises(CheckpointFormatError, match=r"model\.safetensors"):
            seen(streamer, blocks[3], registries[3])
        assert registries[3]["weight"] is host
    assert streamer.in_use == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_a_copy_that_holds_its_thread_does_not_hold_the_forward(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """A GPU copies from memory that is not pinned while the call waits; the forward must launch its compute first."""
    registry = {"weight": torch.full((100,), 7.0)}
    block = Block("block", [HostTensor(registry["weight"], torch.float32, [(registry, "weight")])])
    if pinned:
        block.pack(pin=True)
    threads: list[str] = []
    fetch = Block.fetch

    def noted(self: Block, memory: torch.Tensor) -> None:
        threads.append(threading.current_thread().name)
        fetch(self, memory)

    monkeypatch.setattr(Block, "fetch", noted)
    assert seen(streamer_of([block]), block, registry) == [7]
    (thread,) = threads
    assert (thread == threading.current_thread().name) == pinned
