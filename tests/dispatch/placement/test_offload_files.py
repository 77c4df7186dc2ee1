from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigmodel.checkpoint import mapped_region
from bigmodel.dispatch import dispatch_model
from bigmodel.errors import DispatchError

from ..models import Stack, ids, stack


def test_without_a_folder_weights_in_memory_cannot_go_to_disk() -> None:
    model = stack()
    with pytest.raises(DispatchError, match=r"scale is mapped to 'disk'.*offload_dir"):
        dispatch_model(model, {"": "disk"})
    assert torch.equal(model(ids()), stack()(ids()))


def test_weights_go_to_disk_once_and_tied_ones_stay_tied(tmp_path: Path) -> None:
    model = dispatch_model(stack(), {"": "cpu", "embed": "disk", "head": "disk"}, offload_dir=tmp_path)
    assert mapped_region(model.embed.weight) is not None
    assert model.head.weight is model.embed.weight
    assert mapped_region(model.scale) is None
    assert torch.equal(model(ids()), stack()(ids()))


def test_weights_written_to_disk_lie_as_torch_aligns_them_in_memory(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, width) for width in (5, 3, 1)), nn.LayerNorm(1, dtype=torch.float16))
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert all(mapped_region(each) is not None and each.data_ptr() % 64 == 0 for each in model.parameters())


def test_a_folder_that_cannot_hold_the_weights_is_named_and_the_model_stays(tmp_path: Path) -> None:
    model = stack()
    (tmp_path / "file").write_text("")
    with pytest.raises(DispatchError, match=r"file: .* of offloaded weights cannot be written there \(File exists\)"):
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "file")
    assert torch.equal(model(ids()), stack()(ids()))


def test_weights_on_meta_come_from_the_folder_or_the_index(tmp_path: Path) -> None:
    full = nn.Linear(3, 2)
    save_file({"weight": full.weight.detach(), "other": full.bias.detach()}, tmp_path / "w.safetensors")
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    index = {
        "weight": {"safetensors_file": str(tmp_path / "w.safetensors")},
        "bias": {"safetensors_file": str(tmp_path / "w.safetensors"), "weight_name": "other"},
    }
    model = dispatch_model(empty, {"": "disk"}, offload_index=index)
    assert torch.equal(model(torch.ones(1, 3)), full(torch.ones(1, 3)))
    with torch.device("meta"):
        partial = nn.Linear(3, 2, bias=False)
    model = dispatch_model(partial, {"": "disk"}, offload_dir=tmp_path)
    assert torch.equal(model.weight, full.weight)


def test_weights_that_nobody_supplies_are_named() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(DispatchError, match="no value yet"):
        dispatch_model(model, {"": "cpu"}, state_dict={"scale": torch.ones(8)})
