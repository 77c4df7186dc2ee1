"""Views of weights that a streamed forward keeps show what they showed, after other weights came to its slot."""

from __future__ import annotations

import abc
import copy
import enum
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, undispatch
from bigmodel.dispatch.streaming.kept_views import MOST_MEMBERS, replace_kept

from ...accelerators import at

WIDTH = 8


class Keeping(nn.Module):
    """Keeps parts of its weights, and a weight itself, in attributes and in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.LSTM(WIDTH, WIDTH)
        self.kept: Any = None

    def forward(self, x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        row = self.weight[0].detach()
        self.kept = (row, [self.weight.detach().T, self.weight])
        self.state = SimpleNamespace(row=row[:3])
        given["list"].append(row)
        given[f"row {len(given)}"] = row
        given["deque"].append((row, self.weight))
        found: torch.Tensor = self.inner(x @ self.weight)[0]
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        given: dict[str, Any] = {"list": [], "deque": deque()}
        for block in self.blocks:
            x = block(x, given)
        return x, given


def kept(model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    found = [*given["list"], *(each for pair in given["deque"] for each in pair)]
    found += [row for name, row in given.items() if name.startswith("row")]
    for block in model.blocks:
        row, others = block.kept
        found += [row, *others, block.state.row]
    return [tensor.detach().cpu() for tensor in found]


@pytest.mark.usefixtures("every_accelerator")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_views_that_a_forward_keeps_stay_what_they_were(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 3, WIDTH)
    resident = copy.deepcopy(model).to(at(0))
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    for _ in range(2):
        with mode():
            expected, given = resident(x.to(at(0)))
            output, found = model(x)
        assert torch.equal(output.cpu(), expected.cpu())
        pairs = zip(kept(model, found), kept(resident, given), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    undispatch(model)
    assert all(block.kept[1][1] is block.weight for block in model.blocks)


class KeepingRow(nn.Module):
    """Keeps a row of its weight in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.row = self.weight.detach()[0]
        return x @ self.weight


@pytest.mark.usefixtures("every_accelerator")
def test_views_that_a_forward_keeps_stay_what_they_were_after_the_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(KeepingRow() for _ in range(5)))
    weights = [block.weight.detach().clone() for block in model]
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    for _ in range(2):
        output = model(torch.ones(2, WIDTH))
        assert all(torch.equal(block.row.cpu(), weight[0]) for block, weight in zip(model, weights, strict=True))
        output.sum().backward()
        assert all(torch.equal(block.row.cpu(), weight[0]) for block, weight in zip(model, weights, strict=True))


def test_lists_keep_their_identity_and_what_is_skipped_its_members() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    shared, skipped = [old], [old]
    holder = SimpleNamespace(pair=(old, shared, 1), shared=shared, skipped=skipped)
    assert replace_kept([holder], lambda tensor: new if tensor is old else tensor, {id(skipped)})
    assert holder.pair[0] is new
    assert holder.pair[1] is shared
    assert shared[0] is new
    assert skipped[0] is old
    assert not replace_kept([holder], lambda tensor: tensor)


class Kind(enum.Enum):
    SMALL = 1


class Interface(abc.ABC):
    @abc.abstractmethod
    def found(self) -> None: ...


class Described(nn.Linear):
    """Has attributes whose own attributes cannot be set."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.described = [Kind.SMALL, Kind, Interface, range(3), Interface.found]


@pytest.mark.usefixtures("every_accelerator")
def test_classes_and_members_of_enumerations_are_left_alone() -> None:
    model = nn.Sequential(*(Described() for _ in range(3))).eval()
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        expected = copy.deepcopy(model).to(at(0))(x.to(at(0)))
        dispatch_model(model, {"": "cpu"}, main_device=at(0), no_split_module_classes=["Described"])
        found = model(x.to(at(0)))
    assert torch.equal(found.cpu(), expected.cpu())


class Sample:
    """One of many in a data set; counts how often somebody looks into one."""

    looks = 0

    def __init__(self) -> None:
        self.row: torch.Tensor | None = None

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            Sample.looks += 1
        return super().__getattribute__(name)


class WithData(nn.Module):
    """Holds a data set, in whose last sample it may keep a row of its weight."""

    def __init__(self, data: list[Any], keeps: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.data, self.keeps = {"train": data}, keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keeps:
            self.data["train"][-1].row = self.weight.detach()[0]
        return x @ self.weight


@pytest.mark.slow
@pytest.mark.usefixtures("every_accelerator")
def test_a_large_data_set_is_looked_through_only_if_a_forward_keeps_something() -> None:
    data = [Sample() for _ in range(MOST_MEMBERS + 1)]
    torch.manual_seed(0)
    model = nn.Sequential(*(WithData(data, keeps=False) for _ in range(3)))
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    Sample.looks = 0
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, WIDTH))
    assert Sample.looks == 0

    own = [[*data[:-1], Sample()] for _ in range(3)]
    keeping = nn.Sequential(*(WithData(each, keeps=True) for each in own))
    rows = [block.weight.detach()[0].clone() for block in keeping]
    dispatch_model(keeping, {"": "cpu"}, main_device=at(0))
    with torch.no_grad():
        for _ in range(2):
            keeping(torch.ones(2, WIDTH))
            assert all(torch.equal(each[-1].row.cpu(), row) for each, row in zip(own, rows, strict=True))


def test_members_are_looked_at_level_by_level_up_to_a_number() -> None:
    old, new = torch.zeros(1), torch.ones(1)
    holder = SimpleNamespace(long=[old] * 50, short=[old], deep=[[[old] * 2]])

    def shown(most: int | None) -> list[list[bool]]:
        found: Any = copy.copy(holder)
        found.long, found.short, found.deep = list(holder.long), list(holder.short), [[list(holder.deep[0][0])]]
        replace_kept([found], lambda tensor: new if tensor is old else tensor, most=most)
        return [[each is new for each in members] for members in (found.long, found.short, found.deep[0][0])]

    assert shown(None) == [[True] * 50, [True], [True] * 2]
    assert shown(8) == [[False] * 50, [True], [True] * 2]
    assert shown(7) == [[False] * 50, [True], [False] * 2]
    assert shown(2) == [[False] * 50, [False], [False] * 2]
