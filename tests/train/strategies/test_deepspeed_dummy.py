"""What stands in for an optimizer and a scheduler that DeepSpeed makes."""

from __future__ import annotations

import torch
from torch import nn

from bigmodel.train.strategies.deepspeed_dummy import DummyOptim, DummyScheduler, EngineScheduler


def test_they_keep_what_the_configuration_is_filled_with() -> None:
    parameters = list(nn.Linear(1, 1).parameters())
    optimizer = DummyOptim(iter(parameters), lr=0.1, weight_decay=0.2, betas=(0.9, 0.95))
    assert optimizer.params == parameters
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.1, 0.2, {"betas": (0.9, 0.95)})
    scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2, lr_scheduler_callable=print, x=1)
    assert scheduler.optimizer is optimizer
    assert (scheduler.total_num_steps, scheduler.warmup_num_steps) == (10, 2)
    assert (scheduler.lr_scheduler_callable, scheduler.kwargs) == (print, {"x": 1})


def test_an_engine_s_scheduler_is_not_stepped_twice() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler = EngineScheduler(inner, optimizer)
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    state = scheduler.state_dict()
    optimizer.step()
    inner.step()
    scheduler.load_state_dict(state)
    assert inner.last_epoch == 0
