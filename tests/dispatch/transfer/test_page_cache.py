"""Which pages are in memory, and how reads of weights use the page cache."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bigmodel.checkpoint import Checkpoint
from bigmodel.dispatch.transfer import page_cache
from bigmodel.dispatch.transfer.page_cache import (
    SAMPLES,
    ReadMode,
    ReadPolicy,
    is_page_cached,
    major_faults,
    resident_file_bytes,
    seems_cached,
)
from bigmodel.limits import RESIDENT_SHARE
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


MIB = 2**20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the bytes that the page cache has memory for."""
    monkeypatch.setattr(page_cache, "_policies", weakref.WeakSet())

    def have(nbytes: int) -> None:
        monkeypatch.setattr(page_cache, "page_cache_bytes", lambda used: nbytes)

    return have


def kept(policy: ReadPolicy, reads: int, nbytes: int = 8 * MIB) -> list[int]:
    """Return the numbers of the cold reads that leave their bytes in the cache."""
    return [n for n in range(reads) if policy.mode(cached=False, offset=n * nbytes) is ReadMode.KEEP]


def test_what_fits_into_memory_is_read_through_the_cache(memory: Callable[[int], None]) -> None:
    memory(1000)
    policy = ReadPolicy(100)
    assert policy.all_fits()
    assert len(kept(policy, 100)) == 100


def test_cached_bytes_are_read_from_the_cache(memory: Callable[[int], None]) -> None:
    memory(0)
    assert ReadPolicy(1000).mode(cached=True, offset=MIB) is ReadMode.KEEP


@given(share=st.floats(0.05, 0.95), nbytes=st.sampled_from([2**16, MIB, 3 * MIB, 8 * MIB, 16 * MIB]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_what_does_not_fit_the_same_reads_are_kept_in_every_pass_as_many_as_fit(
    memory: Callable[[int], None], share: float, nbytes: int
) -> None:
    memory(int(share * 1000 * nbytes))
    policy = ReadPolicy(1000 * nbytes)
    first = kept(policy, 1000, nbytes)
    assert not policy.all_fits()
    assert kept(policy, 1000, nbytes) == first
    assert len(first) == pytest.approx(1000 * share, abs=30)
    del policy


def test_kept_reads_are_spread_between_the_others(memory: Callable[[int], None]) -> None:
    memory(500)
    found = kept(ReadPolicy(1000), 1000)
    assert max(later - one for one, later in pairwise(found)) <= 4


def test_readers_of_one_process_share_its_memory(memory: Callable[[int], None]) -> None:
    memory(1000)
    one, other = ReadPolicy(800), ReadPolicy(1200)
    assert len(kept(one, 1000)) == pytest.approx(500, abs=30)
    del other
    gc.collect()
    one._checked = float("-inf")
    assert one.all_fits()


@pytest.mark.parametrize("direct_is_faster", [True, False])
def test_the_others_are_read_the_faster_way(direct_is_faster: bool, memory: Callable[[int], None]) -> None:
    memory(0)
    large = ReadPolicy(1000)
    chosen = []
    for _ in range(10 * ReadPolicy.RETRY):
        mode = large.mode(cached=False, offset=0)
        chosen.append(mode)
        is_direct = mode is ReadMode.DIRECT
        large.record(is_direct, 100, 1.0 if is_direct == direct_is_faster else 2.0)
    later = chosen[2 * ReadPolicy.RETRY :]
    assert later.count(ReadMode.DIRECT if direct_is_faster else ReadMode.PASS) == len(later) - 8
    assert ReadMode.KEEP not in later


def test_mapped_files_in_use_take_memory_that_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "free_memory_bytes", lambda device: 1000)
    assert page_cache.page_cache_bytes(used=300) == RESIDENT_SHARE * 1000 - 300
    assert page_cache.page_cache_bytes(used=1000) == 0


def test_pages_of_a_file_count_as_mapped_while_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2**24)}, path)
    tensor = Checkpoint.open(path).tensor("a")
    before = resident_file_bytes()
    tensor.sum()
    assert resident_file_bytes() - before > 0.9 * tensor.nbytes
