"""What a module writes into its arguments reaches the caller, wherever the module runs."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model
from bigmodel.errors import DispatchError

from ...accelerators import at, two

pytestmark = pytest.mark.usefixtures("every_accelerator")

WIDTH = 8


@dataclass
class Record:
    """What blocks tell each other."""

    last: Any = None
    states: list[torch.Tensor] = field(default_factory=list)


class Writer(nn.Module):
    """Reads what blocks before it wrote, and writes into everything that it is given."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        x: torch.Tensor,
        shared: dict[Any, Any],
        states: list[torch.Tensor],
        record: Record,
        total: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        for index in range(self.index):
            x = x + shared[index]["key"] + states[index] + record.states[index]
        if record.last is not None:
            x = x + record.last
        shared[self.index] = {"key": x * 2}
        shared.pop("first", None)
        states.append(x * 3)
        record.last = x * 4
        record.states.append(x * 5)
        total.add_(x)
        return x


class Writers(nn.Module):
    """Blocks that hand values on in what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Writer(index) for index in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shared: dict[Any, Any] = {"first": torch.ones_like(x)}
        states: list[torch.Tensor] = []
        record = Record()
        total = torch.zeros_like(x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, shared, states, record=record, total=total)
        assert "first" not in shared
        return x, total, *[shared[index]["key"] for index in range(4)], *states, record.last


MAPS: list[Any] = [
    ({"": "cpu"}, "stream"),
    ({"": 0, "blocks.1": "cpu", "blocks.2": "cpu"}, "compute"),
    ({"": "cpu"}, "compute"),
    pytest.param(({"": 0, "blocks.1": 1, "blocks.3": 1}, "stream"), marks=two),
    pytest.param(({"": 1, "blocks.1": 0, "blocks.2": "cpu"}, "compute"), marks=two),
]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("given", MAPS)
def test_what_blocks_write_into_their_arguments_reaches_later_blocks_and_the_caller(
    given: tuple[dict[str, object], str], mode: str
) -> None:
    torch.manual_seed(0)
    model, x = Writers().eval(), torch.randn(2, WIDTH)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, given[0], main_device=at(0), offload=given[1])
    with getattr(torch, mode)():
        for found, expected in zip(model(x), resident(x.to(at(0))), strict=True):
            assert torch.equal(found.cpu(), expected.cpu())


@two
def test_gradients_flow_through_what_resident_blocks_write() -> None:
    torch.manual_seed(0)
    model, x = Writers(), torch.randn(2, WIDTH)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, {"": 0, "blocks.1": 1, "blocks.3": 1})
    sum(each.cpu().sum() for each in model(x)).backward()
    sum(each.cpu().sum() for each in resident(x.to(at(0)))).backward()
    for one, other in zip(model.parameters(), resident.parameters()):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad.cpu(), other.grad.cpu(), rtol=1e-5)


def test_training_through_what_a_streamed_block_writes_is_refused() -> None:
    model = dispatch_model(Writers(), {"": "cpu"}, main_device=at(0))
    with pytest.raises(DispatchError, match=r"'blocks.0'.*writes into an argument.*no gradient"):
        model(torch.randn(2, WIDTH))


@two
def test_a_tensor_that_is_given_twice_is_one_tensor_there_too() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, a: torch.Tensor, b: list[torch.Tensor]) -> torch.Tensor:
            assert len({id(each) for each in (a, *b)}) == 1
            return a * self.weight

    model = dispatch_model(nn.ModuleDict({"a": nn.Linear(2, 2), "b": Same()}), {"a": 0, "b": 1})
    x = torch.ones(1, 2, device=at(0))
    assert model["b"](x, [x, x]).shape == (1, 2)
