"""Every process begins with process 0's weights, one unit at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bigmodel.errors import TrainError
from bigmodel.train import PartialState
from bigmodel.train.strategies.sharded.placing import WeightBroadcaster, check_same_structure, groups_of
from tests.train.multiprocess import on_ranks


def tied(device: str = "cpu") -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2, device=device), "head": nn.Linear(2, 3, device=device)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("count", torch.full((1,), 7.0 + PartialState().process_index))
    return model


@on_ranks
def test_models_without_weights_receive_process_0_s_and_ties_stay() -> None:
    rank = PartialState().process_index
    torch.manual_seed(0)
    expected = tied()
    torch.manual_seed(rank)
    model = tied("meta" if rank else "cpu")
    groups = groups_of(init_device_mesh("cpu", (2,)))
    broadcaster = WeightBroadcaster(model, torch.device("cpu"), groups, keep_on_cpu=True)
    broadcaster.place(model["head"])
    assert model["head"].weight is model["embed"].weight
    broadcaster.place(model)
    assert torch.equal(model["embed"].weight, expected["embed"].weight)
    assert torch.equal(model["head"].bias, expected["head"].bias)
    assert model.count.item() == 7.0


@on_ranks
def test_models_that_differ_are_an_error_on_every_process() -> None:
    check_same_structure(nn.Linear(2, 2))
    wide = nn.Linear(2 + PartialState().process_index, 2)
    with pytest.raises(TrainError, match=r"rank 1 differs from that of rank 0 at \('weight', \(2, 3\)"):
        check_same_structure(wide)
