"""Views of weights that parts return, as tables of positions do, and views that are handed to other parts."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from bigmodel import dispatch_model, get_plan
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.plan import Plan
from bigmodel.plan.memory.assignment import Assignment, assemble
from bigmodel.profile import profile_model

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH, ROWS = 64, 4
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Computes with a weight that it is given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        x = self.down(self.up(x))
        return x if weight is None else linear(x, weight)


class Table(nn.Module):
    """Returns rows of its table, which is a buffer or a parameter."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        rows = torch.randn(WIDTH, WIDTH)
        if is_buffer:
            self.register_buffer("rows", rows)
        else:
            self.rows = nn.Parameter(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows[: x.shape[0]]
        return found


class Adding(nn.Module):
    """Adds rows of a table to what a part returns."""

    def __init__(self, is_buffer: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()
        self.table = Table(is_buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(x) + self.table(x)))
        return found


class Handing(Adding):
    """Hands a row of a weight of one part to another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.first(x)) + self.second(x, self.first.up.weight[:1])
        return found


KINDS: dict[str, Any] = {"buffer": Adding, "parameter": lambda: Adding(False), "handed": Handing}
MAPS: dict[str, dict[str, int | str]] = {
    "table elsewhere": {"first": 0, "second": 1, "third": 0, "table": 1},
    "first elsewhere": {"first": 1, "second": 0, "third": 1, "table": 0},
    "streamed": {"first": "cpu", "second": "cpu", "third": "cpu", "table": 0},
    "table offloaded": {"first": 0, "second": "cpu", "third": 0, "table": "cpu"},
    "streamed and elsewhere": {"first": "cpu", "second": 1, "third": "cpu", "table": 1},
}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    found: nn.Module = KINDS[kind]().eval()
    return found


def planned(model: nn.Module, device_map: dict[str, int | str]) -> Plan:
    """Return the plan of a map, with what a dry run knows."""
    profile = profile_model(
        model, sample_inputs=(X,), no_split_module_classes=["Block", "Table"], device_type="virtual"
    )
    storage = tuple(device_map[unit.name.partition(".")[0]] for unit in profile.units)
    execution = tuple(0 if key == "cpu" else key for key in storage)
    streamed = [unit.slot_bytes() for unit, key in zip(profile.units, storage, strict=True) if key == "cpu"]
    assignment = Assignment(storage, execution, 0, 2 if streamed else 0, max(streamed, default=0))
    return assemble(profile, assignment, {0: 2**24, 1: 2**24, "cpu": 2**30}, "auto")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", MAPS)
def test_outputs_are_those_of_the_whole_model_within_what_is_planned(kind: str, where: str) -> None:
    model = model_of(kind)
    with torch.no_grad():
        expected = model(X)
    gc.collect()
    before = [memory_allocated(device) for device in (0, 1)]
    dispatch_model(model, planned(model, MAPS[where]))
    x = X.to("virtual:0")
    for device in (0, 1):
        reset_peak_memory(device)
    with torch.no_grad():
        found = model(x)
    assert torch.equal(found.cpu(), expected)
    devices = get_plan(model).devices
    for device in (0, 1):
        total = devices[device].total if device in devices else 0
        measured = max_memory_allocated(device) - before[device]
        assert measured <= total
        assert measured >= total - 2 * x.nbytes  # where inputs and outputs that are views or copies are counted twice


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", MAPS)
def test_a_device_map_runs_without_a_dry_run(kind: str, where: str) -> None:
    model = model_of(kind)
    whole = copy.deepcopy(model)
    dispatch_model(model, MAPS[where], no_split_module_classes=["Block", "Table"])
    with torch.no_grad():
        assert torch.equal(model(X), whole(X))
