"""`bigmodel merge-weights`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.cli.main import run
from bigmodel.train.strategies.sharded.distributed_files import save_folder


def test_shards_become_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    save_folder({"model": {"weight": torch.ones(3)}}, state / "pytorch_model_fsdp_0")
    assert run(["merge-weights", str(state), str(out), "--max-shard-size", "1GB", "--remove_checkpoint_dir"]) == 0
    assert (out / "model.safetensors").is_file()
    assert not (state / "pytorch_model_fsdp_0").exists()
    assert f"Merged weights written to {out}" in capsys.readouterr().out


def test_a_folder_without_shards_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["merge-weights", str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no sharded weights" in line
