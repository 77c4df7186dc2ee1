"""A module with other attributes for the time of one call."""

import torch
from torch import nn

from bigmodel.dispatch.stand_in import stand_in


def test_it_computes_with_the_other_attributes_and_the_module_stays_as_it_was() -> None:
    module = nn.Linear(3, 3, bias=False)
    own, other = module.weight, torch.eye(3)
    x = torch.arange(3.0)
    assert torch.equal(stand_in(module, weight=other)(x), x)
    assert module.weight is own
    assert torch.equal(module(x), x @ own.t())


def test_it_is_the_class_own_forward() -> None:
    module = nn.ReLU()
    module.forward = lambda x: x * 0  # type: ignore[method-assign]
    assert torch.equal(stand_in(module)(torch.ones(2)), torch.ones(2))
