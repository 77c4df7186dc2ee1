"""A deep copy of a part of a dispatched model is a plain module."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.errors import DispatchError

from ...accelerators import at
from ..models import ids, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")

MAP = {"": 0, "blocks.1": "cpu", "blocks.2": "disk"}


@pytest.mark.parametrize("name", ["blocks.0", "blocks.1", "blocks.2", "blocks"])
def test_a_copy_of_a_part_has_its_weights_and_nothing_of_dispatching(name: str, tmp_path: Path) -> None:
    plain = stack()
    model = dispatch_model(stack(), MAP, main_device=at(0), offload_dir=tmp_path)
    copied = copy.deepcopy(model.get_submodule(name))
    assert [vars(part).keys() for part in copied.modules()] == [
        vars(part).keys() for part in plain.get_submodule(name).modules()
    ]
    copied.to("cpu")
    expected = plain.get_submodule(name).state_dict()
    assert {key: value.tolist() for key, value in copied.state_dict().items()} == {
        key: value.tolist() for key, value in expected.items()
    }
    pickle.loads(pickle.dumps(copied))


def test_what_is_written_to_a_copy_is_not_in_the_model(tmp_path: Path) -> None:
    model = dispatch_model(stack(), MAP, main_device=at(0), offload_dir=tmp_path)
    for block in model.blocks:
        before = [parameter.tolist() for parameter in block.parameters()]
        with torch.no_grad():
            for parameter in copy.deepcopy(block).parameters():
                parameter.zero_()
        assert [parameter.tolist() for parameter in block.parameters()] == before


class Trained(nn.Module):
    """A part and a copy of it, which is trained in its place, as peft's `modules_to_save`."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.original = part
        self.copied = copy.deepcopy(part).requires_grad_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.copied(inputs)
        return found


@pytest.mark.parametrize("place", [0, "cpu", "disk"])
def test_a_copy_is_trained_in_the_place_of_its_part(place: int | str, tmp_path: Path) -> None:
    def losses(model: nn.Module) -> list[float]:
        model.requires_grad_(False)
        model.blocks[1] = Trained(model.blocks[1])
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        found = []
        for _ in range(3):
            loss = model(ids().to(at(0))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    device_map = {"": 0, "blocks.1": place, "blocks.2": "cpu"}
    model = dispatch_model(stack(), device_map, main_device=at(0), offload_dir=tmp_path)
    found = losses(model)
    assert found == losses(stack().to(at(0)))
    assert len(set(found)) == 3
    undispatch(model)


def test_a_part_is_not_copied_while_the_model_runs() -> None:
    model = stack()
    model.blocks[0].register_forward_hook(lambda *_: copy.deepcopy(model.blocks[0]))
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    with pytest.raises(DispatchError, match="running"):
        model(ids().to(at(0)))
