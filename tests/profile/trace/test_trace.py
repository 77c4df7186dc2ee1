"""Fewer events, the same books: the twin is a ledger that is given every event."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM

from bigmodel.profile import profile_model
from bigmodel.profile.model.experts import RouterChoice
from bigmodel.profile.trace.events import Allocate, Burst, Enter, Event, Free, Leave, Operation, Route, Routed, Scratch
from bigmodel.profile.trace.ledger import Ledger, replay
from bigmodel.profile.trace.trace import InitialStorage, Trace, condense, cut
from bigmodel.profile.trace.work import CALL, Work


def test_units_in_the_order_they_first_ran() -> None:
    assert Trace((Enter(2), Leave(2), Enter(0), Leave(0), Enter(2), Leave(2))).order() == [2, 0]


def test_operations_are_the_work_of_the_unit_that_runs_them() -> None:
    inside, between = Work("product"), Work("move")
    trace = Trace((Operation(between), Enter(3), Operation(inside), Leave(3)))
    assert trace.work() == {-1: [between], 3: [inside]}


def test_storages_that_a_unit_leaves_alive_are_its_cache() -> None:
    trace = Trace(
        (Enter(0), Allocate(0, 10), Allocate(1, 5), Free(1), Leave(0), Allocate(2, 7)), (InitialStorage(8, 20, 0),)
    )
    assert trace.left_alive() == {0: 30}


def test_what_a_method_makes_belongs_to_where_its_input_came_from() -> None:
    events: list[Event] = [
        Enter(2), Allocate(0, 8), Leave(2), Enter(1), Allocate(1, 4), Leave(1, ((1, 4),), source=0), Enter(3), Leave(3),
    ]  # fmt: skip
    (trace,) = cut(events, [(6, 8)])
    assert trace.initial == (InitialStorage(0, 8, 2), InitialStorage(1, 4, 2))
    whole = Trace(tuple(events))
    assert whole.left_alive() == {2: 12}
    assert whole.order() == [2, 1, 3]
    assert whole.forwards() == {2, 3}


def test_router_choices_are_listed_by_unit_and_position_of_the_experts() -> None:
    choice = RouterChoice(tokens=4, per_token=2, count=8)
    assert Trace((Enter(1), Route(0, choice), Leave(1))).choices() == {1: {0: choice}}


def test_outputs_of_units_are_told_apart_among_initial_storages() -> None:
    """The device of an output may be another than that of the rest that its unit has made."""
    events = [Enter(0), Allocate(0, 10), Allocate(1, 20), Leave(0, ((1, 20),)), Enter(1), Leave(1)]
    (trace,) = cut(list(events), [(4, 6)])
    assert trace.initial == (InitialStorage(0, 10, 0), InitialStorage(1, 20, 0, is_output=True))


def test_a_recording_is_cut_into_traces_with_their_initial_storages() -> None:
    events = [Enter(1), Allocate(0, 8), Leave(1), Allocate(1, 4), Free(1), Enter(2), Free(0), Leave(2)]
    first, second = cut(events, [(0, 3), (5, 8)])
    assert first.initial == ()
    assert [(held.storage, held.nbytes, held.unit) for held in second.initial] == [(0, 8, 1)]
    assert second.events == tuple(events[5:8])


ROUTE = Route(0, RouterChoice(tokens=4, per_token=2, count=4), nbytes=16, itemsize=2, expert_tensors=(8, 8))


def book_every_event(trace: Trace, execution_devices: dict[int, Any], **options: Any) -> Ledger[Any]:
    ledger: Ledger[Any] = Ledger(execution_devices, 0, **options)
    for held in trace.initial:
        ledger.start_with(held)
    for event in trace.events:
        ledger.apply(event)
    return ledger


@st.composite
def traces(draw: st.DrawFn, routed: bool = False) -> Trace:
    """Draw units that run one after another, allocate, free what is alive by then, and hand on what they made last;
    some of it in a call of experts, if any is to be `routed`."""
    events: list[Event] = []
    alive, made, handed = [0], 0, 0
    for unit in range(draw(st.integers(1, 5))):
        events.append(Enter(unit, ((handed, 8),) if handed in alive else ()))
        actions = draw(st.lists(st.sampled_from(["make", "free", "scratch", "operate"]), max_size=12))
        ends = sorted(draw(st.lists(st.integers(0, len(actions)), min_size=2, max_size=2))) if routed else []
        for at, action in enumerate([*actions, ""]):
            events += [ROUTE] * (at == min(ends, default=-1)) + [Routed()] * (at == max(ends, default=-1))
            if action == "make":
                made += 1
                alive.append(made)
                events.append(Allocate(made, draw(st.integers(1, 99))))
            elif action == "free" and alive:
                events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
            elif action == "scratch":
                events.append(Scratch(draw(st.integers(1, 99))))
            elif action == "operate":
                events.append(Operation(Work(CALL)))
        handed = made
        events.append(Leave(unit, ((handed, 8),) if handed in alive else ()))
    return Trace(tuple(events), (InitialStorage(0, 50, 0),))


def alive(books: Ledger[Any]) -> dict[Any, int]:
    """Return the bytes that are alive at the end, on the devices that hold any."""
    return {device: nbytes for device, nbytes in books.now.items() if nbytes}


PASSING = Trace(
    (Enter(0, ((0, 8),)), Allocate(1, 20), Operation(Work(CALL)), Free(1), Operation(Work(CALL)), Leave(0)),
    (InitialStorage(0, 50, 0),),
)
"""All that is allocated is freed, on a device that holds nothing else."""


@given(traces(), st.lists(st.sampled_from([0, 1, "cpu"]), min_size=5, max_size=5))
@example(PASSING, [1, 1, 1, "cpu", 0])
def test_condensed_events_give_the_same_peaks_under_every_device_map(trace: Trace, devices: list[Any]) -> None:
    execution_devices = dict(enumerate(devices))
    expected, books = book_every_event(trace, execution_devices), replay(trace, execution_devices, 0)
    assert (books.peak, alive(books)) == (expected.peak, alive(expected))


@given(
    traces(routed=True),
    st.lists(st.sampled_from([0, 1]), min_size=5, max_size=5),
    st.lists(st.integers(1, 5), max_size=5),
    st.sampled_from([None, (3, "cpu"), (5, "cpu")]),
)
def test_condensed_calls_of_experts_give_the_same_peaks_with_every_cache(
    trace: Trace, devices: list[Any], slots: list[int], split: Any
) -> None:
    options: Any = {"experts": {(unit, 0): number for unit, number in enumerate(slots)}, "split": split}
    execution_devices = dict(enumerate(devices))
    expected = book_every_event(trace, execution_devices, **options)
    for _ in range(2):  # the second time, peaks are known
        books = replay(trace, execution_devices, 0, **options)
        assert (books.peak, alive(books)) == (expected.peak, alive(expected))


@pytest.mark.slow
def test_condensed_events_of_a_mixture_give_the_same_peaks_with_small_caches() -> None:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        profile = profile_model(MixtralForCausalLM(config), context_length=64)
    room = {(index, 0): 3 for index, unit in enumerate(profile.units) if unit.experts}
    for phase in profile.phases:
        for execution_devices in ({}, {index: index % 2 for index in range(len(profile.units))}):
            expected = book_every_event(phase.trace, execution_devices, input_device="cpu", experts=room)
            books = replay(phase.trace, execution_devices, 0, input_device="cpu", experts=room)
            assert (books.peak, books.now) == (expected.peak, expected.now)
        assert len(phase.trace.condensed) < len(phase.trace.events) / 2


def test_storages_that_live_within_one_unit_are_one_burst() -> None:
    turn = [Enter(0), Allocate(1, 10), Allocate(2, 20), Free(1), Scratch(5), Free(2), Leave(0)]
    assert list(condense(turn)) == [Enter(0), Burst(30, 0), Leave(0)]


def test_storages_that_outlive_their_unit_are_named() -> None:
    turn = [Enter(0), Allocate(1, 10), Allocate(2, 20), Free(1), Leave(0, ((2, 20),))]
    assert list(condense(turn)) == [Enter(0), Burst(30, 0), Allocate(2, 20), Leave(0, ((2, 20),))]
