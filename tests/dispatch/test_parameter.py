"""Parameters that stay what they are when their values move."""

import torch
from torch import nn

from bigmodel.dispatch.parameter import like, moved_like


class Marked(nn.Parameter):
    """A kind of parameter of somebody else's."""


def test_a_parameter_stays_a_parameter_of_its_kind_with_its_attributes() -> None:
    original = Marked(torch.ones(2))
    original.note = "kept"  # type: ignore[attr-defined]
    found = like(original, torch.zeros(2))
    assert type(found) is Marked
    assert found.note == "kept"  # type: ignore[attr-defined]
    assert found.requires_grad
    assert torch.equal(found, torch.zeros(2))


def test_a_plain_tensor_stays_one() -> None:
    value = torch.zeros(2)
    assert like(torch.ones(2), value) is value


def test_gradients_are_wanted_as_before_unless_said_or_impossible() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert not like(frozen, torch.zeros(2)).requires_grad
    assert not like(nn.Parameter(torch.ones(2)), torch.zeros(2), requires_grad=False).requires_grad
    assert not like(nn.Parameter(torch.ones(2)), torch.zeros(2, dtype=torch.int8)).requires_grad


def test_moving_may_cast() -> None:
    moved = moved_like(nn.Parameter(torch.ones(2)), torch.device("cpu"), torch.bfloat16)
    assert isinstance(moved, nn.Parameter)
    assert moved.dtype == torch.bfloat16
