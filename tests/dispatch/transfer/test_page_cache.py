"""Whether weights are read past the page cache."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bigmodel.checkpoint import Checkpoint
from bigmodel.dispatch.transfer import page_cache as read_policy
from bigmodel.dispatch.transfer.page_cache import (
    SAMPLES,
    ReadPolicy,
    is_page_cached,
    major_faults,
    seems_cached,
)
from tests.preloaded import run


def test_bytes_just_used_are_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2**18)}, path)
    tensor = Checkpoint.open(path).tensor("a")
    tensor.sum()
    assert seems_cached(tensor.data_ptr(), tensor.nbytes)
    assert is_page_cached(tensor.data_ptr() + tensor.nbytes - 1)


def test_bytes_never_used_are_not_in_memory() -> None:
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as fresh:
        memory = torch.frombuffer(fresh, dtype=torch.uint8)
        memory[10 * mmap.PAGESIZE] = 1
        address = memory.data_ptr()
        assert is_page_cached(address + 10 * mmap.PAGESIZE + 17)
        assert not is_page_cached(address + 40 * mmap.PAGESIZE)
        assert seems_cached(address + 10 * mmap.PAGESIZE, 64)
        assert not seems_cached(address + 10 * mmap.PAGESIZE, 31 * mmap.PAGESIZE)
        del memory


def test_a_few_pages_stand_for_a_chunk_the_first_and_the_last_among_them() -> None:
    page, count = mmap.PAGESIZE, 8 * SAMPLES
    with mmap.mmap(-1, (count + 2) * page) as fresh:
        memory = torch.frombuffer(fresh, dtype=torch.uint8)
        chunk = memory[page:-page]
        chunk[::page] = 1
        assert seems_cached(chunk.data_ptr(), chunk.nbytes)
        assert not seems_cached(chunk.data_ptr() - page, chunk.nbytes)
        assert not seems_cached(chunk.data_ptr() + page - 1, chunk.nbytes)
        assert seems_cached(chunk.data_ptr() + 5, 1)
        del memory, chunk


@pytest.mark.slow
def test_the_resident_set_grows_with_what_is_touched() -> None:
    # In a process of its own: in a large one the kernel may take pages away meanwhile.
    code = (
        "import torch; from bigmodel.dispatch.transfer.page_cache import resident_bytes as now; before = now(); "
        "touched = torch.ones(2**24); assert now() - before > 0.9 * touched.nbytes, now() - before"
    )
    run(["-c", code], check=True)


def test_a_page_read_from_disk_counts_as_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2**20)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            shown = torch.frombuffer(mapped, dtype=torch.uint8)
            in_memory, before = is_page_cached(shown.data_ptr()), major_faults()
            shown[0].item()
            # A file system in memory has no disk to read from, and never lets a page go.
            assert in_memory or major_faults() > before
            del shown


def policy(nbytes: int, free: int, monkeypatch: pytest.MonkeyPatch) -> ReadPolicy:
    monkeypatch.setattr(read_policy, "free_memory_bytes", lambda device: free)
    return ReadPolicy(nbytes)


def test_checkpoints_that_fit_into_memory_are_read_through_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = policy(100, 1000, monkeypatch)
    assert not any(fits.bypasses(cached=False) for _ in range(100))


def test_cached_bytes_are_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not policy(1000, 100, monkeypatch).bypasses(cached=True)


@pytest.mark.parametrize("direct_is_faster", [True, False])
def test_checkpoints_that_do_not_fit_are_read_the_faster_way(
    direct_is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = policy(1000, 100, monkeypatch)
    chosen = []
    for _ in range(10 * ReadPolicy.RETRY):
        bypass = large.bypasses(cached=False)
        chosen.append(bypass)
        large.record(bypass, 100, 1.0 if bypass == direct_is_faster else 2.0)
    later = chosen[2 * ReadPolicy.RETRY :]
    assert later.count(direct_is_faster) == len(later) - 8
