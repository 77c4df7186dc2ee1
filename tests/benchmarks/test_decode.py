"""Decode steps: everybody's, and that ours compute the same."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from bigmodel.benchmarks.models import copy_placed_alike

from .answering import answer, limit, rows


@pytest.mark.slow
def test_all_ways_are_measured_and_ours_gives_the_same_bits(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["decode", "--steps", "1"], workdir, capsys)
    assert len(rows(found)) == 6
    assert all(row["median"] > 0 and row["runs"] == 1 for row in rows(found))
    assert limit(found, "to the bit")["kept"]
    assert limit(found, "same places in pages")["bound"] == 1.03
    assert limit(found, "saved by save_model")["bound"] == 1.03


def test_a_resident_weight_may_lie_where_the_file_has_it() -> None:
    memory = torch.arange(2 * mmap.PAGESIZE, dtype=torch.uint8)
    tensor = memory[-memory.data_ptr() % mmap.PAGESIZE :][0x1A8 : 0x1A8 + 512].view(torch.float16).view(16, 16)
    copied = copy_placed_alike(tensor)
    assert copied.data_ptr() % mmap.PAGESIZE == 0x1A8
    assert copied.data_ptr() != tensor.data_ptr()
    assert torch.equal(copied.view(torch.int16), tensor.view(torch.int16))


@pytest.mark.slow
def test_peers_may_be_left_out(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["decode", "--steps", "1", "--no-peers"], workdir, capsys)
    assert not [row for row in rows(found) if row["variant"].startswith("accelerate")]
