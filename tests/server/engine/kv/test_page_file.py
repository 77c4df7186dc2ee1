"""The file of pages: each position of each layer has its place, and takes space only while it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bigmodel.dispatch.streaming.kv_file import KVDisk
from bigmodel.server.engine.kv.buffers import PROMPT_BLOCK as B
from bigmodel.server.engine.kv.page_file import Frames, PageFile

PAGES = 5


def frames(layers: list[int], dim: int = 6) -> Frames:
    """Two frames of each layer, whose keys and values are of different sizes, and none like another."""
    sizes = [(2 * B, 2, dim), (2 * B, 2, dim + 3)]
    return {layer: tuple(torch.randn(size) for size in sizes) for layer in layers}  # type: ignore[misc]


@pytest.fixture
def disk(tmp_path: Path) -> KVDisk:
    return KVDisk(tmp_path, 1 << 20)


def test_what_is_written_of_each_layer_is_read_again(disk: KVDisk) -> None:
    held = frames([1, 4])
    file = PageFile(disk, PAGES, [4, 1], 2 * (6 + 9) * 4)
    file.write([(0, 1), (PAGES - 1, 0)], held)
    other = frames([1, 4])
    file.read(PAGES - 1, 1, other)
    file.read(0, 0, other)
    for layer, both in held.items():
        for which, each in enumerate(both):
            assert torch.equal(other[layer][which], each.roll(B, 0))
            assert torch.equal(file.view(layer, which, each, 5, 3), each[B + 5 : B + 8])


def test_rows_may_be_written_alone(disk: KVDisk) -> None:
    file = PageFile(disk, PAGES, [0], 2 * (6 + 9) * 4)
    keys, values = frames([0])[0]
    file.write_rows(0, [(3, 5), (2 * B, 2 * B + 1)], (keys[:3], values[:3]))
    assert torch.equal(file.view(0, 0, keys, 3, 2), keys[:2])
    assert torch.equal(file.view(0, 1, values, 2 * B, 1), values[2:3])


def test_space_is_taken_by_what_is_written_and_given_back(disk: KVDisk, tmp_path: Path) -> None:
    held = frames([0, 1], dim=16)
    file = PageFile(disk, PAGES, [0, 1], 2 * (16 + 19) * 4)
    assert file.space == 0
    file.write([(1, 0), (2, 1)], held)
    size = sum(each.nbytes for both in held.values() for each in both)
    assert size <= file.space <= size + 8 * 4096
    assert disk.space == file.space
    assert not os.listdir(tmp_path)
    file.forget([2, 1], held)
    assert file.space <= 8 * 4096
