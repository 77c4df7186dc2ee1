"""Which models make room: as few as do, idle ones before busy ones, the least recently used first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.plan import DevicePlan, Part, Plan
from bigmodel.server.models.policy import Key, LoadedShare, fits, left_of, nearly_as_good, to_unload

BUDGETS: Mapping[Key, int] = {0: 24, "cpu": 64}


def share(name: str, last_used: float, *, idle: bool = True, gpu: int = 0, cpu: int = 0) -> LoadedShare:
    return LoadedShare(name, {0: gpu, "cpu": cpu}, idle, last_used)


def unloaded(loaded: list[LoadedShare], gpu: int = 0, cpu: int = 0) -> list[str]:
    return to_unload(BUDGETS, loaded, lambda left: fits({0: gpu, "cpu": cpu}, left))


def test_two_that_fit_side_by_side_both_stay() -> None:
    assert unloaded([share("a", 0, gpu=14)], gpu=10) == []
    assert unloaded([share("a", 0, gpu=14)], gpu=11) == ["a"]


def test_the_least_recently_used_one_goes() -> None:
    loaded = [share("new", 9, gpu=10), share("old", 1, gpu=10)]
    assert unloaded(loaded, gpu=10) == ["old"]
    assert unloaded(loaded, gpu=20) == ["old", "new"]


def test_an_idle_one_goes_before_a_busy_one_that_was_used_less_recently() -> None:
    loaded = [share("busy", 1, idle=False, gpu=10), share("idle", 9, gpu=10)]
    assert unloaded(loaded, gpu=10) == ["idle"]
    assert unloaded(loaded, gpu=20) == ["idle", "busy"]


def test_one_whose_memory_does_not_help_stays() -> None:
    loaded = [share("on the host", 1, cpu=60), share("on the GPU", 9, gpu=20)]
    assert unloaded(loaded, gpu=10) == ["on the GPU"]
    assert unloaded(loaded, cpu=10) == ["on the host"]
    small = [share("small", 1, gpu=2), share("large", 9, gpu=20)]
    assert unloaded(small, gpu=20) == ["large"]


def test_a_device_without_a_budget_has_no_limit() -> None:
    assert fits({"disk": 10**15}, BUDGETS)
    assert left_of(BUDGETS, [LoadedShare("a", {"disk": 10**15, 0: 4}, True, 0)]) == {0: 20, "cpu": 64}


shares = st.builds(
    share, st.uuids().map(str), st.floats(0, 100), idle=st.booleans(), gpu=st.integers(0, 12), cpu=st.integers(0, 30)
)


@given(st.lists(shares, max_size=5), st.integers(0, 24), st.integers(0, 64))
def test_what_goes_is_enough_and_none_of_it_could_stay(loaded: list[LoadedShare], gpu: int, cpu: int) -> None:
    going = unloaded(loaded, gpu, cpu)

    def enough(names: tuple[str, ...] | list[str]) -> bool:
        return fits({0: gpu, "cpu": cpu}, left_of(BUDGETS, [each for each in loaded if each.name not in names]))

    assert enough(going)
    for number in range(len(going)):
        assert not any(map(enough, combinations(going, number)))
    idle = [each.name for each in loaded if each.idle]
    if enough(idle):
        assert set(going) <= set(idle)  # nobody waits for a busy one where idle ones do


def plan(runs_on: Key = 0, **parts: Key) -> Plan:
    """A plan with parts of ten bytes on these devices."""
    made = tuple(Part(name, device, runs_on, 10, "") for name, device in parts.items())
    return Plan("Tiny", "auto", 0, MappingProxyType({0: DevicePlan(0, None)}), made)


@pytest.mark.parametrize(
    ("made", "best", "expected"),
    [
        (plan(a=0, b=0), plan(a=0, b=0), True),
        (plan(a=0, b="cpu"), plan(a=0, b=0), False),  # it could be resident
        (plan(a="cpu", b="cpu"), plan(a=0, b="cpu"), False),  # twice as much is fetched
        (plan(a="cpu", b="cpu", c="cpu", d="cpu", e="cpu"), plan(a=0, b="cpu", c="cpu", d="cpu", e="cpu"), True),
        (plan(a="disk", b="cpu"), plan(a="cpu", b="cpu"), False),  # as much, but from disk
        (plan("cpu", a="cpu", b="cpu"), plan(a="cpu", b="cpu"), False),  # nothing is fetched: the host computes
        (plan("cpu", a="cpu", b="cpu"), plan("cpu", a="cpu", b="cpu"), True),
    ],
)
def test_nearly_as_good_is_a_plan_that_fetches_little_more(made: Plan, best: Plan, expected: bool) -> None:
    assert nearly_as_good(made, best) is expected
