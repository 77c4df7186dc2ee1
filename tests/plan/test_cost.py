from __future__ import annotations

from typing import Any

import pytest

from bigmodel.plan.assignment import Assignment, host_only
from bigmodel.plan.cost import CostModel, StepTime
from bigmodel.profile import Profile, profile_model

from ..profile.models import tiny_llama
from .machines import machine

LINK = 1e6
"""Bytes per second: slower than anything is computed."""


def profile() -> Profile:
    return profile_model(tiny_llama(num_hidden_layers=4), context_length=32, new_tokens=2)


def assignment(of: Profile, held: list[Any], runs: list[Any], slots: int = 2) -> Assignment:
    slab = max(unit.slab(False) for unit in of.units)
    return Assignment(tuple(held), tuple(runs), 0, slots, slab)


@pytest.mark.usefixtures("accelerators")
def test_what_is_streamed_takes_as_long_as_its_bytes_take_over_the_link() -> None:
    of = profile()
    blocks = [index for index, unit in enumerate(of.units) if unit.is_block]
    held = ["cpu" if index in blocks else 0 for index in range(len(of.units))]
    found = CostModel(of, machine(link=LINK)).seconds(1, assignment(of, held, [0] * len(held)))
    over_the_link = sum(of.units[index].weights for index in blocks) / LINK
    assert found.link == pytest.approx(over_the_link, rel=0.01)
    assert found.seconds == pytest.approx(over_the_link, rel=0.05)
    assert found.binds == "the link to the main device"


@pytest.mark.usefixtures("accelerators")
def test_every_change_of_device_takes_time() -> None:
    of = profile()
    cost, count = CostModel(of, machine(link=LINK, host=1e-10)), len(of.units)
    together = [0] * (count // 2) + ["cpu"] * (count - count // 2)
    in_turn = [0 if index % 2 else "cpu" for index in range(count)]
    seconds = [cost.seconds(0, assignment(of, runs, runs)).seconds for runs in (together, in_turn)]
    assert seconds[0] < seconds[1]


def test_the_same_assignment_takes_the_same_time_however_often_it_is_asked_for() -> None:
    of = profile()
    cost = CostModel(of, machine())
    everywhere = host_only(of)
    assert cost.seconds(1, everywhere) == cost.seconds(1, everywhere) == CostModel(of, machine()).seconds(1, everywhere)


def test_what_binds_is_what_takes_most() -> None:
    assert StepTime(3.0, {"cpu": 1.0, 0: 2.0}, link=1.5).binds == "computing on 0"
    assert StepTime(3.0, {0: 2.0}, disk=2.5).binds == "reading from disk"
