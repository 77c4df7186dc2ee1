from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bigmodel.errors import CheckpointNotFoundError
from bigmodel.train import Accelerator, PartialState
from bigmodel.utils import files


@pytest.mark.parametrize("name", ["state.bin", "state.safetensors"])
def test_saved_objects_are_loaded(name: str, tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3).t()}
    files.save(state, tmp_path / name, safe_serialization=name.endswith("safetensors"))
    assert torch.equal(files.load(tmp_path / name)["weight"], state["weight"])


def test_one_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(PartialState(cpu=True).__dict__, "process_index", 1)
        files.save({}, tmp_path / "state.bin")
        with pytest.raises(CheckpointNotFoundError):
            files.load(tmp_path / "state.bin")
        files.save({}, tmp_path / "state.bin", save_on_each_node=True)
    assert files.load(tmp_path / "state.bin") == {}


def test_a_checkpoint_consists_of_these_files(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_state(str(tmp_path / "saved"))
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names >= {files.SAFE_WEIGHTS_NAME, f"{files.OPTIMIZER_NAME}.bin", f"{files.RNG_STATE_NAME}_0.pkl"}


def test_safetensors_can_be_read_by_other_libraries(tmp_path: Path) -> None:
    shared = torch.ones(2)
    files.save({"a": shared, "b": shared}, tmp_path / "tied.safetensors", safe_serialization=True)
    with safe_open(tmp_path / "tied.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert [path.name for path in tmp_path.iterdir()] == ["tied.safetensors"]
