"""The resident set is measured in processes of their own: what one has freed before belongs to nobody's tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.checkpoint import Checkpoint
from bigmodel.verify.peak_rss import host_bytes

GROWTH = """
import torch
from bigmodel.verify.peak_rss import HostMark, return_freed_memory_at_once
return_freed_memory_at_once()
torch.ones(2**20)
with HostMark(files=False) as mark:
    for _ in range(20):
        kept = torch.ones(2**22)
print(mark.grown)
"""

FILES = """
import mmap, sys
import torch
from bigmodel.verify.peak_rss import HostMark, return_freed_memory_at_once
return_freed_memory_at_once()
torch.ones(2**20)
with open(sys.argv[1], "rb") as file, HostMark(files=True) as mark:
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    kept = torch.ones(2**22)
    for _ in range(20):
        sum(view[position] for position in range(0, len(view), 4096))
print(mark.grown)
"""


def grown(script: str, *arguments: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return int(done.stdout)


def test_the_mark_counts_what_was_alive_at_once() -> None:
    """A new tensor is made before the old one goes, so two are alive at once, and never a third."""
    size = 4 * 2**22
    assert abs(grown(GROWTH) - 2 * size) < 0.02 * size


def test_pages_of_files_are_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**25))
    size = 4 * 2**22
    assert abs(grown(FILES, str(path)) - size) < 0.1 * size


def test_views_of_files_count_where_the_map_has_them_in_host_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(8, 8)}, path)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(Checkpoint.open(path).tensor("weight"))
    assert host_bytes(model, {"0": "disk", "1": "cpu"}) == 4 * 64
    assert host_bytes(model, {"": "cpu"}) == 2 * 4 * 64
