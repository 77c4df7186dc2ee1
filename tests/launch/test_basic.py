"""The configuration that needs no questions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.errors import LaunchError
from bigmodel.launch import load_config
from bigmodel.launch.basic import basic_config, write_basic_config


@pytest.mark.parametrize(("gpus", "kind", "processes"), [(0, "NO", 1), (1, "NO", 1), (4, "MULTI_GPU", 4)])
def test_one_process_for_each_gpu(monkeypatch, gpus: int, kind: str, processes: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = basic_config("bf16")
    assert (found.distributed_type, found.num_processes, found.use_cpu) == (kind, processes, gpus == 0)


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert write_basic_config("no", path) == path
    path.write_text(path.read_text().replace("num_processes: 1", "num_processes: 9"))
    assert write_basic_config("no", path) is None
    assert load_config(path).num_processes == 9


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(LaunchError, match="mixed_precision is 'fp4', which is not one of"):
        basic_config("fp4")
