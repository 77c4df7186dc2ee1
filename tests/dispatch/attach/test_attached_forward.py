"""An attached forward moves inputs and outputs, returns what the module writes into its arguments, and is removable."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.attached_forward import AttachedForward
from bigmodel.errors import DispatchError

from ...accelerators import at, two

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = "virtual:0"
WIDTH = 8


class Scale(nn.Module):
    """Says where it was called, and multiplies."""

    def forward(self, x: torch.Tensor, *, by: torch.Tensor | None = None, keep: object = None) -> torch.Tensor:
        """Multiply."""
        self.seen = str(x.device)
        self.kept = keep
        return 2 * x if by is None else x * by


def attached(module: nn.Module, device: str | None = DEVICE) -> AttachedForward:
    forward = AttachedForward(module, None if device is None else torch.device(device), ("keep",))
    forward.attach()
    return forward


def test_inputs_come_to_the_device_by_position_and_by_name() -> None:
    module = Scale()
    attached(module)
    output = module(torch.ones(2), by=torch.full((2,), 3.0))
    assert module.seen == str(output.device) == "virtual:0"
    assert output.cpu().tolist() == [3, 3]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_with_gaps_keep_their_strides(mode: Any) -> None:
    """Kernels are chosen by strides: closed gaps would change the last bits of a result."""
    module = nn.Identity()
    attached(module)
    with mode():
        last = torch.arange(24.0).reshape(2, 4, 3)[:, -1:]
        output = module(last)
    assert str(output.device) == "virtual:0"
    assert output.stride() == last.stride()
    assert torch.equal(output.cpu(), last)


def test_inputs_named_by_skip_keys_stay_where_they_are() -> None:
    module, kept = Scale(), torch.ones(2)
    attached(module)
    module(torch.ones(2), keep=kept)
    assert module.kept is kept


def test_the_output_goes_back_to_the_input_or_to_a_device() -> None:
    module = Scale()
    forward = attached(module)
    forward.returns_to_input = True
    assert module(torch.ones(2)).device.type == "cpu"
    forward.returns_to_input, forward.output_device = False, torch.device("virtual:1")
    assert str(module(torch.ones(2)).device) == "virtual:1"


def test_without_a_device_nothing_is_moved() -> None:
    module, x = Scale(), torch.ones(2)
    attached(module, None)
    assert module(x).device.type == "cpu"


def test_an_attached_forward_looks_like_the_forward_it_stands_for() -> None:
    module = Scale()
    forward = attached(module)
    assert inspect.signature(module.forward) == inspect.signature(Scale().forward)
    assert forward.__doc__ == "Multiply."


def test_detaching_gives_the_module_its_own_forward_back() -> None:
    module = Scale()
    module.forward = own = lambda x: x + 1  # type: ignore[method-assign]
    forward = attached(module)
    assert module(torch.ones(1)).cpu().item() == 2
    forward.detach()
    assert module.forward is own
    plain = Scale()
    attached(plain).detach()
    assert "forward" not in plain.__dict__


def test_an_attached_forward_keeps_no_module_alive() -> None:
    module = Scale()
    forward = attached(module)
    del module
    forward.detach()


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


@pytest.mark.usefixtures("every_accelerator")
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


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
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


@pytest.mark.usefixtures("every_accelerator")
def test_training_through_what_a_streamed_block_writes_is_refused() -> None:
    model = dispatch_model(Writers(), {"": "cpu"}, main_device=at(0))
    with pytest.raises(DispatchError, match=r"'blocks.0'.*writes into an argument.*no gradient"):
        model(torch.randn(2, WIDTH))


@pytest.mark.usefixtures("every_accelerator")
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


class Halves(nn.Module):
    """Yields both halves of its weighted input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from (x * self.weight).chunk(2)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Halves(), Halves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, self.second):
            for half in part(x):
                x = x + half
        return x


@two
@pytest.mark.parametrize("device_map", [{"first": 0, "second": 1}, {"": "cpu"}, {"first": 1, "second": "cpu"}])
def test_what_a_generator_yields_comes_back_as_outputs_do(device_map: dict[str, object]) -> None:
    expected = Joined()(torch.ones(2, 2))
    model = dispatch_model(Joined(), device_map, main_device=0)  # type: ignore[arg-type]
    output = model(torch.ones(2, 2, device=at(0)))
    assert output.device == torch.device(at(0))
    assert torch.equal(output.cpu(), expected)


class WritesFirst(nn.Module):
    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.sum() + other.sum()


def test_writing_into_one_of_two_arguments_that_share_memory_elsewhere_is_refused() -> None:
    module = WritesFirst()
    attached(module)
    x = torch.ones(4, 3)
    with torch.no_grad(), pytest.raises(DispatchError, match=r"share memory .*shapes \(4, 3\) and \(3,\)"):
        module(x, x[0])
    assert x.tolist() == torch.ones(4, 3).tolist()


def test_arguments_that_lie_between_each_other_in_one_memory_may_be_written() -> None:
    module = WritesFirst()
    attached(module)
    both = torch.ones(4, 6)
    with torch.no_grad():
        assert module(both[:, :3], both[:, 3:]).item() == 36
    assert both.sum(0).tolist() == [8, 8, 8, 4, 4, 4]
