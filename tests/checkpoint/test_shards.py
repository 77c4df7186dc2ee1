from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from bigmodel.checkpoint.shards import SafetensorsShard
from bigmodel.sources.headers import read_header
from tests.checkpoint.helpers import maps_of, same_bits


def test_a_shard_maps_its_file_once_for_the_disk_and_once_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    tensors = {name: torch.rand(5) for name in "abc"}
    save_file(tensors, path)
    shard = SafetensorsShard(path, read_header(path))
    assert maps_of(path) == 0
    kept = [shard.tensor(name) for name in shard.keys()]  # noqa: SIM118 - a shard is no mapping
    assert maps_of(path) == 1
    kept += [shard.tensor(name, resident=True) for name in "abc"]
    assert maps_of(path) == 2
    assert all(same_bits(shard.tensor(name), tensors[name]) for name in tensors)
    assert shard.entry("b").shape == (5,)
