"""The resident set is measured in a process of its own: the test process caches memory that it freed earlier."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.checkpoint import Checkpoint
from bigmodel.verify.peak_rss import host_bytes, resolution
from tests.shared import Once

TENSOR_BYTES = 2**24

SCRIPT = """
import mmap, sys
import torch
from bigmodel.verify import peak_rss
from bigmodel.verify.peak_rss import PeakRSS, return_freed_memory_at_once
return_freed_memory_at_once()
torch.ones(2**20)
with PeakRSS(files=False) as tensors:
    for _ in range(20):
        kept = torch.ones(2**22)
del kept
grown = [tensors.grown]
for peak_rss.SAMPLE_SECONDS in (peak_rss.SAMPLE_SECONDS, 3600):
    with open(sys.argv[1], "rb") as file, PeakRSS(files=True) as beside_files:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        kept = torch.ones(2**22)
        for _ in range(20):
            sum(view[position] for position in range(0, len(view), 4096))
    grown.append(beside_files.grown)
    view.close()
    del kept
print(*grown)
"""


@pytest.fixture(scope="module")
def growth(once: Once) -> list[int]:
    """Peak RSS of making tensors of 16 MiB: without a mapped file, with one of 32 MiB, and with one where the thread
    that samples never runs."""
    found: list[int] = once("growth", grown)
    return found


def grown(folder: Path) -> list[int]:
    path = folder / "file"
    path.write_bytes(bytes(2**25))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return [int(text) for text in done.stdout.split()]


@pytest.mark.long
@pytest.mark.slow
def test_the_peak_counts_tensors_that_are_alive_at_the_same_time(growth: list[int]) -> None:
    """Each tensor is made before the previous one is freed: two are alive at once, never three."""
    assert abs(growth[0] - 2 * TENSOR_BYTES) < 0.1 * TENSOR_BYTES


@pytest.mark.slow
def test_pages_of_mapped_files_are_subtracted_from_the_peak(growth: list[int]) -> None:
    assert abs(growth[1] - TENSOR_BYTES) < 0.1 * TENSOR_BYTES
    assert abs(growth[2] - TENSOR_BYTES) < 0.1 * TENSOR_BYTES


def test_views_of_files_count_as_host_memory_if_the_map_assigns_them_to_the_host(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(8, 8)}, path)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(Checkpoint.open(path).tensor("weight"))
    assert host_bytes(model, {"0": "disk", "1": "cpu"}) == 4 * 64
    assert host_bytes(model, {"": "cpu"}) == 2 * 4 * 64


@pytest.mark.parametrize(("processors", "pages"), [(2, 124), (64, 16256)])
def test_the_kernels_peak_may_lack_a_batch_of_pages_of_each_counter_and_processor(
    processors: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    assert resolution() == pages * mmap.PAGESIZE
