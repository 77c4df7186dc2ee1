"""The page cache: out means out, and in means in."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigmodel.benchmarks.harness import BenchmarkError, pagecache
from bigmodel.benchmarks.harness.pagecache import advise_out, cached_bytes, evict, resident_bytes, warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: mincore and posix_fadvise")

SIZE = 4 * 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


def shown(path: Path) -> torch.Tensor:
    """Return the file's bytes as a tensor that shows a private map of it."""
    with path.open("r+b") as source:
        return torch.frombuffer(mmap.mmap(source.fileno(), SIZE, mmap.MAP_PRIVATE), dtype=torch.uint8)


def test_a_file_is_out_after_evict_and_in_after_warm(file: Path) -> None:
    evict([file])
    assert cached_bytes(file) == 0
    warm([file])
    assert cached_bytes(file) == SIZE


def test_own_maps_are_emptied_first_and_show_the_same_bytes_afterwards(file: Path) -> None:
    tensor = shown(file)
    total = int(tensor.sum(dtype=torch.int64))
    assert resident_bytes(tensor) == SIZE
    evict([file])
    assert resident_bytes(tensor) == 0
    assert cached_bytes(file) == 0
    assert int(tensor.sum(dtype=torch.int64)) == total


def test_a_map_that_is_removed_meanwhile_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = file.open("r+b")
    view = mmap.mmap(source.fileno(), SIZE, mmap.MAP_PRIVATE)
    view[::4096]
    real = pagecache.c_library()

    class UnmapsFirst:
        mincore = real.mincore

        def madvise(self, *arguments: object) -> int:
            view.close()
            return int(real.madvise(*arguments))

    monkeypatch.setattr(pagecache, "c_library", UnmapsFirst)
    evict([file])
    assert view.closed
    assert cached_bytes(file) == 0
    source.close()


def test_somebody_who_still_reads_ahead_is_waited_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm([file])
    calls: list[Path] = []

    def read_again_twice(path: Path) -> None:
        advise_out(path)
        calls.append(path)
        if len(calls) <= 2:
            path.read_bytes()

    monkeypatch.setattr(pagecache, "advise_out", read_again_twice)
    evict([file])
    assert len(calls) == 3
    assert cached_bytes(file) == 0


@pytest.mark.slow
def test_what_another_process_has_mapped_is_not_called_cold(file: Path) -> None:
    script = (
        "import mmap, sys\n"
        f"file = open({str(file)!r}, 'rb')\n"
        "view = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)\n"
        "sum(view[::4096])\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "mapped\n"
        with pytest.raises(BenchmarkError, match="another process may have it mapped"):
            evict([file])
        other.stdin.close()


def test_resident_bytes_counts_the_pages_that_were_touched(file: Path) -> None:
    evict([file])
    tensor = shown(file)
    assert resident_bytes(tensor) == 0
    warm([file])
    tensor[: 2 * mmap.PAGESIZE].sum()
    assert 2 * mmap.PAGESIZE <= resident_bytes(tensor) <= SIZE


def test_without_a_list_of_maps_files_are_evicted_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "_MAPS", Path("/proc/none/maps"))
    evict([file])
    assert cached_bytes(file) <= 16 * mmap.PAGESIZE
