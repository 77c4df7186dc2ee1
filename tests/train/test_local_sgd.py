"""Processes that train apart and meet now and then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train import Accelerator, DistributedType
from bigmodel.train.local_sgd import LocalSGD
from tests.train.multiprocess import on_ranks


def test_one_process_trains_as_without_it() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    before = model.weight.item()
    with LocalSGD(accelerator, model, local_sgd_steps=1) as local:
        local.step()
    assert (model.weight.item(), local.num_steps) == (before, 1)


def test_what_cannot_be_averaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    with pytest.raises(TrainError, match="local_sgd_steps is 0"):
        LocalSGD(accelerator, nn.Linear(1, 1), 0)
    monkeypatch.setattr(type(accelerator.strategy), "distributed_type", DistributedType.FSDP)
    with pytest.raises(TrainError, match="LocalSGD averages whole models"):
        LocalSGD(accelerator, nn.Linear(1, 1), 2)
    LocalSGD(accelerator, nn.Linear(1, 1), 2, enabled=False)


@pytest.mark.slow
@on_ranks
def test_parameters_are_averaged_every_few_steps_and_at_the_end() -> None:
    accelerator = Accelerator()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.tensor([[-1.0 - 2 * accelerator.process_index]])  # each step adds 1 here, 3 on the other process
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(x).sum())
            optimizer.step()
            local.step()
            seen.append(accelerator.unwrap_model(model).weight.item())
    own = 1.0 + 2 * accelerator.process_index
    assert seen == [own, 4.0, 4.0 + own]
    assert accelerator.unwrap_model(model).weight.item() == 6.0
    with LocalSGD(accelerator, model, 2, enabled=False):
        optimizer.zero_grad()
        accelerator.backward(model(x).sum())
    assert accelerator.unwrap_model(model).weight.grad.item() == -2.0


@on_ranks
def test_batches_that_only_accumulate_gradients_count() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.tensor([[-1.0 - 2 * accelerator.process_index]])  # each window adds 1 here, 3 on the other process
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=4) as local:
        for _ in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            seen.append(accelerator.unwrap_model(model).weight.item())
    own = 1.0 + 2 * accelerator.process_index
    assert seen == [0.0, own, own, 4.0, 4.0, 4.0 + own]


@on_ranks
def test_an_error_inside_ends_it_without_waiting() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    before = accelerator.unwrap_model(model).weight.item()
    with pytest.raises(ValueError, match="stop"), LocalSGD(accelerator, model, 1):
        raise ValueError("stop")
    assert accelerator.unwrap_model(model).weight.item() == before
