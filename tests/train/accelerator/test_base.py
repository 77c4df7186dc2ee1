"""What every part of the Accelerator knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel.train import Accelerator, ProjectConfiguration


def test_who_and_where_this_process_is() -> None:
    accelerator = Accelerator()
    assert accelerator.device == torch.device("cpu")
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.mixed_precision == "no"
    accelerator.wait_for_everyone()


def test_without_fp16_there_is_no_scaler() -> None:
    assert Accelerator(mixed_precision="bf16").scaler is None


@pytest.mark.parametrize("each_node", [False, True])
def test_one_process_writes_for_all_or_for_those_of_its_machine(
    each_node: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ProjectConfiguration(project_dir=str(tmp_path), save_on_each_node=each_node)
    accelerator = Accelerator(project_config=settings)
    monkeypatch.setattr(accelerator.state._partial, "process_index", 1)  # the first process of the second machine
    assert accelerator._writes_files is each_node
    assert accelerator.is_local_main_process
    assert not accelerator.is_main_process
