"""A call that is computed twice gives the outputs and the gradients of one that is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from bigmodel.profile.training.recompute import Gradients, RecomputedCall, gradients_of, other_parameter, snapshot


class Twice(RecomputedCall):
    """A module whose weights are there at both computations; counts these."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(args, kwargs)
        self.module = module
        self.computed = 0

    def compute_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert not torch.is_grad_enabled()
        self.computed += 1
        return self.module(*args, **kwargs)

    def gradients(self, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
        self.computed += 1
        args, kwargs = self.arguments_again(inputs)
        with torch.enable_grad():
            outputs = self.tensors_of(self.module(*args, **kwargs))
        return gradients_of(outputs, received, [*inputs, *self.module.parameters()])


class Mixed(nn.Module):
    """Takes and returns tensors among other things; one of its outputs is of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor, scale: float, *, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        y = (x * self.weight).tanh() * scale + more["bias"]
        return {"said": "well", "values": [y, y.argmax()], "nothing": None}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0.5, -1.0], requires_grad=True), torch.tensor([0.1, 0.2], requires_grad=True)


def test_outputs_and_gradients_are_those_of_a_plain_call() -> None:
    plain, twice = Mixed(), Mixed()
    (x, bias), (other_x, other_bias) = inputs(), inputs()
    expected = plain(x, 1.5, more={"bias": bias})
    call = Twice(twice, other_x, 1.5, more={"bias": other_bias})
    found = call.run(twice.parameters())
    assert (found["said"], found["nothing"]) == ("well", None)
    assert torch.equal(found["values"][0], expected["values"][0])
    assert not found["values"][1].requires_grad
    expected["values"][0].sum().backward()
    found["values"][0].sum().backward()
    assert call.computed == 2
    for one, other in ((x, other_x), (bias, other_bias), (plain.weight, twice.weight)):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_only_tensors_that_require_a_gradient_get_one() -> None:
    x, fixed = torch.ones(2, requires_grad=True), torch.ones(2)
    unused = torch.ones(2, requires_grad=True)
    found = gradients_of([x * fixed], [torch.ones(2)], [x, fixed, unused])
    assert [each is not None for each in found] == [True, False, False]
    assert gradients_of([x * fixed], [None], [x]) == [None]


def test_the_recomputation_starts_from_the_cache_of_the_first_computation() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    call = Twice(nn.Identity(), torch.ones(1), cache=cache)
    cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    _, kwargs = call.arguments_again([torch.ones(1)])
    assert (kwargs["cache"].get_seq_length(), cache.get_seq_length()) == (3, 4)


def test_arguments_other_than_caches_are_passed_unchanged() -> None:
    mask = [True]
    assert snapshot(mask) is mask


def test_a_parameter_that_is_no_source_is_found_in_the_graph() -> None:
    own, other, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    output = own(x) @ other.weight
    assert other_parameter([output], own.parameters()) is other.weight
    assert other_parameter([output], [*own.parameters(), other.weight]) is None
    assert other_parameter([output.detach()], []) is None


def test_weights_that_the_first_computation_finds_get_gradients_too() -> None:
    other = nn.Parameter(torch.tensor([2.0]))

    class Borrows(Twice):
        def further_weights(self) -> list[torch.Tensor]:
            assert self.computed == 1
            return [other]

        def gradients(self, inputs: Sequence[torch.Tensor], received: Gradients) -> Gradients:
            return [*super().gradients(inputs, received), torch.tensor([7.0])]

    own = nn.Linear(2, 2)
    Borrows(own, torch.ones(1, 2)).run(own.parameters()).sum().backward()
    assert other.grad is not None
    assert other.grad.item() == 7
    assert own.weight.grad is not None
