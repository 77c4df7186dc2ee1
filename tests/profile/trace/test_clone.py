from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bigmodel.profile import profile_units
from bigmodel.profile.trace.clone import fake_clone, find_shortenings

from ..models import Stack


def test_a_clone_is_fake_keeps_ties_and_leaves_the_model_alone() -> None:
    model = Stack(tied=True).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mode = FakeTensorMode()
    clone = fake_clone(model, mode, torch.device("cpu"), {})
    assert all(isinstance(parameter, FakeTensor) for parameter in clone.parameters())
    assert clone.head.weight is clone.embed.weight
    assert not clone.training
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_clone_takes_the_dtypes_it_will_be_loaded_as() -> None:
    model = nn.Linear(2, 2)
    clone = fake_clone(model, FakeTensorMode(), torch.device("cpu"), {id(model.weight): torch.float16})
    assert (clone.weight.dtype, clone.bias.dtype) == (torch.float16, torch.float32)


def test_long_lists_of_blocks_are_cut() -> None:
    model = Stack(depth=9)
    units = profile_units(model)
    (shortening,) = find_shortenings(model, units)
    assert shortening.path == "blocks"
    assert [units[index].name for index in shortening.units] == [f"blocks.{index}" for index in range(9)]
    clone = fake_clone(model, FakeTensorMode(), torch.device("cpu"), {}, [shortening])
    assert len(clone.blocks) == shortening.kept < 9
    assert len(model.blocks) == 9
