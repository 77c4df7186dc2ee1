"""One process that owns the whole model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bigmodel.train.strategies.base import StrategySettings, make_strategy
from bigmodel.train.strategies.single import SingleProcess
from bigmodel.train.types import DistributedType

CPU = torch.device("cpu")


def strategy(process_index: int = 0) -> SingleProcess:
    made = make_strategy(DistributedType.NO, StrategySettings(CPU, process_index=process_index))
    assert isinstance(made, SingleProcess)
    return made


def test_a_model_is_moved_only_when_asked_to() -> None:
    model = nn.Linear(1, 1, device="meta")
    assert strategy().prepare_model(model, device_placement=False, evaluation_mode=False) is model
    assert model.weight.is_meta


def test_model_and_optimizer_come_back_from_their_files(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    strategy().save_model(model, tmp_path, 1)
    strategy().save_optimizer(optimizer, model, tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"model_1.safetensors", "optimizer_1.bin"}
    other = nn.Linear(2, 2)
    fresh = torch.optim.Adam(other.parameters())
    strategy().load_model(other, tmp_path, 1)
    strategy().load_optimizer(fresh, other, tmp_path, 1)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    strategy(process_index=1).save_model(model, tmp_path, 0, writes=False)
    strategy(process_index=1).save_optimizer(torch.optim.SGD(model.parameters()), model, tmp_path, 0, writes=False)
    assert list(tmp_path.iterdir()) == []
    assert (strategy(0).should_save_model, strategy(1).should_save_model) == (True, False)
