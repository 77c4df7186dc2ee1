"""Rows on the host, of which RAM holds the most recent: the same as if it held all, within its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.dispatch.streaming.host_rows import HostRows
from bigmodel.dispatch.streaming.kv_file import KVDisk
from bigmodel.plan.memory.host_kv import rows_on_disk
from tests.preloaded import run


def allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def append(rows: HostRows, new: torch.Tensor) -> None:
    at = 0
    for target in rows.grow(new):
        target.copy_(new.permute(2, 0, 1, 3)[at : at + len(target)])
        at += len(target)


@pytest.mark.parametrize("in_ram", [1, 4, 9, 50])
def test_rows_are_those_that_were_appended(tmp_path: Path, in_ram: int) -> None:
    rows, expected = HostRows(allocate, 40, in_ram, KVDisk(tmp_path, 4096)), torch.empty(2, 3, 0, 5)
    for count, kept in ((7, None), (1, None), (20, 11), (30, 29), (3, 2), (50, None)):
        new = torch.randn(2, 3, count, 5)
        append(rows, new)
        expected = torch.cat([expected, new], dim=2)
        assert torch.equal(rows.tensor(), expected)
        assert rows.length - rows.on_disk <= in_ram
        if kept is not None:
            rows.keep(kept)
            expected = expected[:, :, :kept]
            assert torch.equal(rows.tensor(), expected)


def test_as_many_rows_are_on_disk_as_is_planned(tmp_path: Path) -> None:
    for planned in (5, 16, 17, 40):
        rows = HostRows(allocate, planned, 16, KVDisk(tmp_path, 4096))
        append(rows, torch.randn(1, 1, planned, 4))
        assert rows.on_disk == rows_on_disk(16, planned, 16)


RESIDENT = """
import sys
from pathlib import Path
import torch
from bigmodel.dispatch.streaming.host_rows import HostRows
from bigmodel.dispatch.streaming.kv_file import KVDisk
from bigmodel.verify.peak_rss import PeakRSS, resolution, return_freed_memory_at_once
return_freed_memory_at_once()
row, whole, in_ram = 2**12, 2**14, 2**11  # 64 MiB, of which RAM holds 8
new = torch.randn(1, 1, 2**8, row // 4)
def filled(tokens, in_ram):
    disk = KVDisk(Path(sys.argv[1]), row * whole)
    rows = HostRows(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), whole, in_ram, disk)
    for _ in range(tokens // new.shape[2]):
        at = 0
        for target in rows.grow(new):
            target.copy_(new.permute(2, 0, 1, 3)[at : at + len(target)])
            at += len(target)
    return rows
filled(2**10, 2**8)  # what is loaded on first use is no part of it
with PeakRSS(files=False) as measured:
    rows = filled(whole, in_ram)
print(measured.grown, row * in_ram + 2**20 + resolution(), rows.on_disk)
"""


@pytest.mark.slow
def test_the_resident_set_grows_by_what_ram_holds(tmp_path: Path) -> None:
    done = run(["-c", RESIDENT, tmp_path])
    assert done.returncode == 0, done.stderr
    grown, most, on_disk = map(int, done.stdout.split())
    assert on_disk * 2**12 == 7 * 2**23
    assert 2**23 * 0.9 <= grown <= most
