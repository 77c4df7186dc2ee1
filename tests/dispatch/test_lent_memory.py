"""Memory of models whose code uses weights outside their module is planned to the byte, wherever the weights lie."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.dispatch import dispatch_model
from bigmodel.plan import Plan, plan
from bigmodel.plan.memory.assignment import Assignment, assemble
from bigmodel.profile import Profile, profile_model
from tests.examples import few

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH = 16
READS = {"linear": 1, "affine": 2, "bias": 1, "transposed": 1, "product": 2, "penalty": 1}
"""What the model's code does with weights of its parts, and of how many."""
OWN = {"call": 1, "tanh": 0, "keep": 0, "add": 0}
BORROWS = ("linear", "bias", "product")
"""What a part does with the weight of another."""


@dataclass(frozen=True)
class Program:
    """What a model computes.

    Attributes:
        parts: For each part, the part whose weight it uses and how; None: it is a plain layer.
        steps: The model's forward: operations, each with the parts that it uses.
        rows: Rows of the input.
    """

    parts: tuple[tuple[int, str] | None, ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    rows: int


class Borrowing(nn.Module):
    """A layer that also computes with the weights of another part."""

    def __init__(self, other: nn.Module, how: str) -> None:
        super().__init__()
        self.own, self.other, self.how = nn.Linear(WIDTH, WIDTH), [other], how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = self.other[0]
        if self.how == "linear":
            return F.linear(self.own(x), other.weight)
        if self.how == "bias":
            return torch.tanh(self.own(x)) + other.bias
        return self.own(x + (other.weight @ other.weight).sum(0))


class Running(nn.Module):
    """Runs a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in program.parts)
        for index, borrowed in enumerate(program.parts):
            if borrowed is not None:
                self.parts[index] = Borrowing(self.parts[borrowed[0]], borrowed[1])
        self.steps = program.steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        for name, indices in self.steps:
            x, kept = self.step(name, [self.parts[index] for index in indices], x, kept)
        return x

    def step(
        self, name: str, used: list[nn.Module], x: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if name == "call":
            x = used[0](x)
        elif name == "tanh":
            x = torch.tanh(x)
        elif name == "keep":
            kept = x
        elif name == "add":
            x = x + kept
        elif name == "linear":
            x = F.linear(x, used[0].weight)
        elif name == "affine":
            x = F.linear(x, used[0].weight, used[1].bias)
        elif name == "bias":
            x = x + used[0].bias
        elif name == "transposed":
            x = x @ used[0].weight.t()
        elif name == "product":
            x = x @ (used[0].weight @ used[1].weight)
        else:
            x = x + used[0].weight.pow(2).sum()
        return x, kept


@st.composite
def programs(draw: st.DrawFn) -> Program:
    count = draw(st.integers(2, 4))
    plain = [0, *(index for index in range(1, count) if draw(st.booleans()))]
    borrowed = st.tuples(st.sampled_from(plain), st.sampled_from(BORROWS))
    parts = tuple(None if index in plain else draw(borrowed) for index in range(count))
    steps = []
    for _ in range(draw(st.integers(2, 7))):
        name = draw(st.sampled_from([*OWN, *READS]))
        able = range(count) if name == "call" else plain
        steps.append((name, tuple(draw(st.sampled_from(able)) for _ in range({**OWN, **READS}[name]))))
    return Program(parts, tuple(steps), draw(st.sampled_from([3, 40, 200])))


def built(program: Program) -> nn.Module:
    torch.manual_seed(0)
    return Running(program).eval()


def inputs(program: Program) -> torch.Tensor:
    return torch.randn(program.rows, WIDTH, generator=torch.Generator().manual_seed(0))


def profiled(program: Program) -> Profile:
    classes = ["Linear", "Borrowing"]
    x = inputs(program)
    return profile_model(built(program), sample_inputs=(x,), device_type="virtual", no_split_module_classes=classes)


def by_hand(profile: Profile, places: list[tuple[int | str, int]]) -> Plan:
    """Return the plan of units that are stored at the first of their places and, if that is the host, run at the
    other."""
    storage = tuple(stored for stored, _ in places)
    execution = tuple(runs if stored == "cpu" else stored for stored, runs in places)
    streamed = [index for index, stored in enumerate(storage) if stored == "cpu"]
    turns = max(sum(execution[index] == device for index in streamed) for device in (0, 1))
    slot = max((profile.units[index].nbytes for index in streamed), default=0)
    chosen = Assignment(storage, execution, 0, slots=min(2, turns), slot_bytes=slot)  # type: ignore[arg-type]
    return assemble(profile, chosen, {}, "by hand")


def check(program: Program, by: Plan) -> None:
    """Run a program by a plan: same bits, and the planned bytes on each accelerator."""
    model, x = built(program), inputs(program)
    gc.collect()
    before = [memory_allocated(index) for index in range(2)]
    with torch.inference_mode():
        expected = built(program)(x)
        dispatch_model(model, by)
        for index in range(2):
            reset_peak_memory(index)
        output = model(x if by.main_device == "cpu" else x.to(f"virtual:{by.main_device}"))
    measured = {index: max_memory_allocated(index) - before[index] for index in range(2)}
    assert torch.equal(output.cpu(), expected)
    assert measured == {index: by.devices[index].total if index in by.devices else 0 for index in range(2)}


PLACES = st.tuples(st.sampled_from([0, 1, "cpu"]), st.sampled_from([0, 1]))


@pytest.mark.slow
@settings(max_examples=few(8))
@given(programs(), st.lists(PLACES, min_size=4, max_size=4))
def test_any_placement_has_the_bits_of_the_whole_model_and_the_planned_peaks(
    program: Program, places: list[tuple[int | str, int]]
) -> None:
    profile = profiled(program)
    check(program, by_hand(profile, places[: len(profile.units)]))


@pytest.mark.slow
@settings(max_examples=few(8))
@given(programs(), st.sampled_from([0.3, 0.5, 0.7]), st.sampled_from([0.2, 0.5, 0.8]))
def test_plans_for_two_accelerators_and_the_host_have_the_planned_peaks(
    program: Program, less: float, less_of_second: float
) -> None:
    profile = profiled(program)
    whole = plan(profile, {0: 2**30, "cpu": 2**30}).devices[0].total
    budgets = {0: whole - int(profile.weights * less), 1: whole - int(profile.weights * less_of_second), "cpu": 2**30}
    check(program, plan(profile, budgets))
