"""A forward that branches on values that are not known is planned for each of its ways that takes most."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model, get_plan
from bigmodel.devices import max_memory_allocated, memory_allocated, reset_peak_memory
from bigmodel.profile import profile_model
from bigmodel.profile.trace.branches import MOST_TURNS, MOST_WAYS, Answers, other_ways

pytestmark = pytest.mark.usefixtures("accelerators")

WIDTH, ROWS = 32, 8


def wide(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.repeat(1, times).relu().unflatten(1, (times, WIDTH)).sum(1)


class Branching(nn.Module):
    """Takes more memory in one of its ways."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.way(self.first(x)))
        return found


def if_true(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return wide(x, 9)
    return x


def if_false(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return wide(x, 9)


def nested(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        if x[0, 0] > 0:
            return x
        return wide(x, 9)
    return wide(x, 3)


def one_after_the_other(x: torch.Tensor) -> torch.Tensor:
    kept = wide(x, 3) if x.sum() > 0 else x
    return wide(kept + x, 5) if x[0, 0] > 0 else wide(kept.repeat(1, 2)[:, :WIDTH] + x, 7)


def within_a_loop(x: torch.Tensor) -> torch.Tensor:
    for each in x.unbind(0)[:3]:
        if each.sum() < 0:
            x = wide(x, 9)
    return x


def signed(total: float, first: float) -> torch.Tensor:
    """Return an input that the first layer passes on, whose sum and first element have these signs."""
    x = torch.full((ROWS, WIDTH), total / WIDTH)
    x[0, 0] = first
    return x


WAYS = [signed(total, first) for total in (1, -1) for first in (0.01, -0.01)]


@pytest.mark.parametrize("way", [if_true, if_false, nested, one_after_the_other, within_a_loop])
def test_the_peak_of_all_ways_is_planned_to_the_byte(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Branching(way).eval()
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
        model.first.bias.zero_()
    profile = profile_model(model, sample_inputs=WAYS[0], device_type="virtual")
    gc.collect()
    before = memory_allocated(0)
    model.to("virtual:0")
    given = [x.to("virtual:0") for x in WAYS]
    reset_peak_memory(0)
    with torch.no_grad():
        for x in given:
            model(x)
    predicted = profile.weights + profile.buffers + profile.dynamic_peaks({}, main=0)[0]
    others = sum(x.nbytes for x in given[1:])
    assert max_memory_allocated(0) - before - others == predicted


def test_budgets_hold_whichever_way_a_forward_goes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Branching(if_false) for _ in range(3))).eval()
    gc.collect()
    before = memory_allocated(0)
    budget = 44_000  # of which the way that is not taken when all conditions hold needs half
    dispatch_model(model, max_memory={0: budget, "cpu": "1GB"}, main_device=0, sample_inputs=WAYS[0])
    assert get_plan(model).streamed
    reset_peak_memory(0)
    with torch.no_grad():
        for x in WAYS:
            model(x)
    assert max_memory_allocated(0) - before <= get_plan(model).devices[0].total <= budget


def test_a_way_that_raises_is_left_out() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("an input is not a number")
        return wide(x, 5)

    profile = profile_model(Branching(checked), sample_inputs=WAYS[0])
    assert profile.unknown == ""
    assert [len(phase.also) for phase in profile.phases] == [0]


def test_ways_that_take_the_same_are_recorded_once() -> None:
    def noting(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if x.sum() > 0 else 3)

    profile = profile_model(Branching(noting), sample_inputs=WAYS[0])
    assert [len(phase.also) for phase in profile.phases] == [0]


@pytest.mark.slow
def test_a_loop_until_a_condition_holds_ends() -> None:
    def halved(x: torch.Tensor) -> torch.Tensor:
        while (x.abs() > 1).any():
            x = x / 2
        return x

    assert profile_model(Branching(halved), sample_inputs=WAYS[0]).unknown == ""


def asked(answers: Answers, questions: int) -> list[bool]:
    """Ask at one place after the other."""
    conditions = [lambda: answers.ask(), lambda: answers.ask(), lambda: answers.ask(), lambda: answers.ask()]
    return [condition() for condition in conditions[:questions]]


def tried(questions: int) -> list[list[bool]]:
    """Return the answers of each way through a forward that asks so often."""
    first = Answers()
    return [asked(first, questions), *(asked(each, questions) for each in other_ways(first))]


def test_all_ways_are_tried_once_first_those_of_one_answer() -> None:
    assert tried(2) == [[True, True], [False, False], [False, True], [True, False]]
    assert tried(1) == [[True], [False]]
    assert tried(0) == [[]]


def test_of_many_ways_a_few_are_tried() -> None:
    assert len(tried(4)) == MOST_WAYS


def test_a_place_has_one_answer_but_in_a_loop_that_would_not_end() -> None:
    answers = Answers()
    assert {answers.ask() for _ in range(MOST_TURNS)} == {True}
    assert not [answers.ask() for _ in range(MOST_TURNS + 1)][-1]
