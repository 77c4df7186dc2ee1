"""accelerate's functions that save and load sharded models: its file names, and the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bigmodel import Accelerator
from bigmodel.errors import TrainError
from bigmodel.utils import load_fsdp_model, save_fsdp_model
from tests.train.multiprocess import run_on_ranks
from tests.train.strategies.small_sharded import full, sharded


def save_and_load(folder: Path, kind: str, names: list[str]) -> None:
    accelerator, model, optimizer = sharded(state_dict_type=kind)
    model, optimizer = accelerator.prepare(model, optimizer)
    plugin = accelerator.state.fsdp_plugin
    before = full(accelerator, model)
    for index in (0, 1):
        save_fsdp_model(plugin, accelerator, model, folder, index)
    assert sorted(path.name for path in folder.iterdir()) == names
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    accelerator.wait_for_everyone()
    load_fsdp_model(plugin, accelerator, model, folder, 1)
    after = full(accelerator, model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("FULL_STATE_DICT", ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"]),
        ("SHARDED_STATE_DICT", ["pytorch_model_fsdp_0", "pytorch_model_fsdp_1"]),
    ],
)
def test_weights_come_back_from_the_files_of_accelerate(tmp_path: Path, kind: str, names: list[str]) -> None:
    run_on_ranks(save_and_load, tmp_path, kind, names)


def test_without_fsdp_there_is_one_clear_error(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TrainError, match="no FSDP plugin"):
        save_fsdp_model(None, accelerator, torch.nn.Linear(1, 1), tmp_path)
