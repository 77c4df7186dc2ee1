"""Telling what is given to `prepare`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from bigmodel.train import Accelerator
from bigmodel.train.accelerator.objects import ORDER, is_loader, is_model, is_optimizer, is_scheduler, those


class OwnSchedule:
    """A scheduler by its methods alone."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def get_last_lr(self) -> list[float]:
        return [0.1]


def test_every_object_is_of_one_kind() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader: Any = DataLoader([1])
    kinds = (is_model, is_optimizer, is_scheduler, is_loader)
    for number, obj in enumerate((model, optimizer, schedule, loader)):
        assert [kind(obj) for kind in kinds] == [number == other for other in range(4)]
    assert is_scheduler(OwnSchedule())
    assert not any(kind(3) for kind in kinds)
    assert those(nn.Module, [model, None, optimizer]) == [model]
    assert [next(n for n, kind in enumerate(ORDER) if kind(obj)) for obj in (loader, model, optimizer)] == [0, 1, 2]


def test_a_prepared_scheduler_is_not_taken_for_a_bare_one() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    prepared = Accelerator().prepare(torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert not is_scheduler(prepared)
