from __future__ import annotations

from collections.abc import Callable

import pytest

from bigmodel.profile.model.experts import RouterChoice
from bigmodel.profile.trace.equal_modules import LayerSample, sample_layers
from bigmodel.profile.trace.events import Allocate, Enter, Free, Leave, Operation, Route, Routed, Scratch
from bigmodel.profile.trace.extrapolate import CannotExtrapolate, extrapolate, refuse_gathered
from bigmodel.profile.trace.ledger import replay
from bigmodel.profile.trace.trace import InitialStorage, Trace
from bigmodel.profile.trace.work import CALL, PRODUCT, Work


def layer(unit: int, first: int, before: int | None) -> list[object]:
    """What one layer does: a temporary, its output, and the end of the output before it; one storage stays."""
    events: list[object] = [Enter(unit), Allocate(first, 8), Allocate(first + 1, 4), Allocate(first + 2, 2)]
    events += [Operation(Work(PRODUCT)), Scratch(3), Free(first)]
    events += ([Free(before)] if before is not None else []) + [Leave(unit), Operation(Work(CALL))]
    return events


def mixture(unit: int, first: int, before: int | None) -> list[object]:
    """As `layer`, with experts that make the output."""
    _, *rest = layer(unit, first, before)
    route = Route(0, RouterChoice(tokens=4, per_token=2, count=4), nbytes=16, expert_tensors=(8,))
    called = [Allocate(first + 3, 32), Operation(Work(PRODUCT)), Scratch(5), Free(first + 3), Allocate(first + 4, 1)]
    return [Enter(unit), route, *called, Routed(), *rest, Free(first + 4)]


def recording(layers: int, make: Callable[[int, int, int | None], list[object]] = layer) -> Trace:
    """A trace of `layers` equal layers between two others; storage 5*n+1 is the output of layer n."""
    events: list[object] = [Allocate(900, 4)]
    for index in range(layers):
        events += make(index, 5 * index, 5 * index - 4 if index else 900)
    return Trace((*events, Enter(99), Allocate(901, 64), Leave(99), Free(5 * layers - 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [layer, mixture])
def test_what_layers_share_is_what_all_events_give(make: Callable[[int, int, int | None], list[object]]) -> None:
    count, stand_ins = sample_layers(["a"] * 9) or (0, ())
    shared = extrapolate(recording(count, make), LayerSample("", tuple(range(9)), count, stand_ins))
    whole = Trace(shared.events, shared.initial)
    assert shared == whole
    assert len({part.segment for part in shared.parts}) < len(shared.parts)
    assert [*shared.outline] == [*whole.outline]
    assert shared.without_workspace == whole.without_workspace
    assert shared.work() == whole.work() == recording(9, make).work()
    assert shared.expert_works() == whole.expert_works()
    assert shared.choices() == whole.choices() == recording(9, make).choices()
    assert (shared.order(), shared.forwards()) == (whole.order(), whole.forwards())
    assert (shared.kept, shared.left_alive()) == (whole.kept, whole.left_alive())


def test_layers_within_another_unit_are_not_told_apart() -> None:
    count, stand_ins = sample_layers(["a"] * 9) or (0, ())
    short = Trace((Enter(50), *recording(count).events, Leave(50)))
    shared = extrapolate(short, LayerSample("", tuple(range(9)), count, stand_ins))
    whole = Trace(shared.events)
    assert ([*shared.outline], shared.work()) == ([*whole.outline], whole.work())


@pytest.mark.parametrize("layers", [5, 6, 11])
def test_the_repeated_trace_has_the_peaks_of_the_whole_one(layers: int) -> None:
    count, stand_ins = sample_layers(["a"] * layers) or (0, ())
    long = extrapolate(recording(count), LayerSample("", tuple(range(layers)), count, stand_ins))
    whole = recording(layers)
    for placing in ({}, {unit: unit % 2 for unit in range(layers)}, {unit: unit for unit in range(layers)}):
        ours, theirs = replay(long, placing, 0), replay(whole, placing, 0)
        assert ours.peak == theirs.peak
        assert ours.now == theirs.now
    assert long.order() == whole.order()


def test_initial_storages_of_layers_exist_for_every_copy() -> None:
    count, stand_ins = sample_layers(["a"] * 8) or (0, ())
    short = recording(count)
    held = Trace(short.events, tuple(InitialStorage(500 + unit, 16, unit) for unit in range(count)))
    long = extrapolate(held, LayerSample("", tuple(range(8)), count, stand_ins))
    assert sorted(item.unit for item in long.initial) == list(range(8))
    assert len({item.storage for item in long.initial}) == 8


def test_a_phase_without_the_list_of_blocks_is_unchanged() -> None:
    trace = Trace((Enter(50), Allocate(0, 8), Leave(50)))
    assert extrapolate(trace, LayerSample("", tuple(range(8)), 4, (0, 1, 2, 2, 2, 2, 2, 3))).events == trace.events


def test_layers_that_run_out_of_order_cannot_be_repeated() -> None:
    events = [event for unit in (1, 0, 2, 3) for event in (Enter(unit), Leave(unit))]
    with pytest.raises(CannotExtrapolate):
        extrapolate(Trace(tuple(events)), LayerSample("", tuple(range(6)), 4, (0, 1, 2, 2, 2, 3)))


def test_layers_whose_results_one_operation_gathers_cannot_be_repeated() -> None:
    sample = LayerSample("blocks", tuple(range(8)), 4, (0, 1, 2, 2, 2, 2, 2, 3))
    refuse_gathered(sample, [frozenset({0, 1}), frozenset({2, 3}), frozenset({1, 90, 91})])
    with pytest.raises(CannotExtrapolate, match="of blocks make is gathered"):
        refuse_gathered(sample, [frozenset({0, 1, 2, 3})])
