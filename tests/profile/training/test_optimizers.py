from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.errors import PlanError
from bigmodel.profile.training.optimizers import OPTIMIZERS, check_optimizer, make_optimizer


def parameters() -> list[nn.Parameter]:
    return list(nn.Linear(4, 4).parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_made_by_its_name(name: str) -> None:
    check_optimizer(name)
    made = make_optimizer(name, parameters())
    assert type(made).__name__.lower() == name
    assert len(made.param_groups[0]["params"]) == 2


def test_any_function_of_parameters_will_do() -> None:
    def slow(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-9)

    check_optimizer(slow)
    assert make_optimizer(slow, parameters()).defaults["lr"] == 1e-9


@pytest.mark.parametrize("optimizer", ["adamax", 3, None, nn.Linear(2, 2)])
def test_what_is_no_optimizer_is_refused_with_those_known(optimizer: object) -> None:
    with pytest.raises(PlanError, match="use one of adamw, adam"):
        check_optimizer(optimizer)


def test_a_function_that_makes_something_else_is_refused() -> None:
    with pytest.raises(PlanError, match="made a list"):
        make_optimizer(list, parameters())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="takes no arguments"):
        make_optimizer(object, parameters())  # type: ignore[arg-type]
