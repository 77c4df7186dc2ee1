"""The functions behind accelerate's commands, for programs that call them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigmodel.commands.merge import merge_command, merge_command_parser
from bigmodel.train.strategies.sharded.distributed_files import save_folder

from .answers import ROOT


def test_shards_are_merged_by_the_arguments_of_the_command(tmp_path: Path) -> None:
    save_folder({"model": {"weight": torch.ones(3)}}, tmp_path / "pytorch_model_fsdp_0")
    merge_command(merge_command_parser().parse_args([str(tmp_path), str(tmp_path / "out")]))
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].tolist() == [1.0, 1.0, 1.0]
    arguments = ["merge-weights", str(tmp_path), str(tmp_path / "bin"), "--unsafe_serialization"]
    parser = argparse.ArgumentParser()
    merge_command_parser(parser.add_subparsers())
    read = parser.parse_args([*arguments, "--remove_checkpoint_dir"])
    read.func(read)
    assert (tmp_path / "bin" / "pytorch_model.bin").is_file()
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["bigmodel.commands.launch", pytest.param("accelerate.commands.launch", marks=pytest.mark.long)]
)
def test_launching_by_the_module_of_the_command(module: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('ran', sys.argv[1:])\n")
    run = ["run", "-m", module] if module.startswith("accelerate") else []
    command = [sys.executable, "-m", *(["bigmodel", *run] if run else [module])]
    arguments = ["--cpu", "--num_processes", "1", str(script), "--flag"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "ran ['--flag']" in done.stdout
