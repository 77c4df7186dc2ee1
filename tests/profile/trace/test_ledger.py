from __future__ import annotations

from bigmodel.profile.model.experts import RouterChoice
from bigmodel.profile.trace.events import (
    OUTSIDE,
    Allocate,
    Call,
    Enter,
    Free,
    Leave,
    OutsideUse,
    Return,
    Route,
    Routed,
    Scratch,
)
from bigmodel.profile.trace.expert_calls import expert_calls, host_call, split_call
from bigmodel.profile.trace.ledger import replay
from bigmodel.profile.trace.trace import InitialStorage, Trace, condense

CHAIN = Trace(
    (
        Enter(0),
        Allocate(0, 100),
        Leave(0),
        Enter(1, ((0, 100),)),
        Allocate(1, 30),
        Allocate(2, 100),
        Free(1),
        Leave(1),
        Free(0),
    )
)
"""Unit 0 makes 100 bytes; unit 1 reads them, uses 30 for itself, and makes 100."""


def test_the_peak_is_the_most_alive_at_once() -> None:
    books = replay(CHAIN, {}, "gpu")
    assert books.peak == {"gpu": 230}
    assert books.now == {"gpu": 100}


def test_inputs_from_another_device_are_copied_while_the_unit_runs() -> None:
    books = replay(CHAIN, {0: 0, 1: 1}, 0)
    assert books.peak == {0: 100, 1: 230}
    assert books.now == {0: 0, 1: 100}


def test_outputs_that_are_named_are_moved_to_the_main_device() -> None:
    returned = tuple(Leave(0, ((0, 100),)) if event == Leave(0) else event for event in CHAIN.events)
    for elsewhere in ("cpu", 1):
        books = replay(Trace(returned), {0: elsewhere, 1: 0}, 0)
        assert books.peak == {elsewhere: 100, 0: 230}
        assert books.now[elsewhere] == 0
    back_and_forth = replay(Trace(returned), {0: 1, 1: 1}, 0)
    assert back_and_forth.peak == {0: 100, 1: 230}


METHOD = Trace(
    (
        Allocate(0, 100),
        Enter(1, ((0, 100),)),
        Allocate(1, 30),
        Leave(1, ((1, 30), (0, 100)), source=0),
        Free(1),
    )
)
"""A method of unit 1 is given 100 bytes, and returns them with 30 that it makes."""


def test_outputs_of_a_method_go_to_the_device_of_its_first_input() -> None:
    books = replay(METHOD, {1: "other"}, "main")
    assert books.peak == {"main": 230, "other": 130}  # what it was given comes back as another tensor
    assert books.now == {"main": 200, "other": 0}
    assert replay(METHOD, {}, "main").peak == {"main": 130}


def test_offloaded_weights_that_are_read_between_units_are_copied_for_the_operation() -> None:
    trace = Trace((Enter(0), Allocate(0, 100), Leave(0), Allocate(1, 10, 0), OutsideUse(((0, 50), (1, 7)), 0), Free(0)))
    assert replay(trace, {}, 0).peak == {0: 110}
    assert replay(trace, {}, 0, offloaded={0: "cpu"}).peak == {0: 160}
    assert replay(trace, {}, 0, offloaded={0: "cpu", 1: "cpu"}).peak == {0: 167}
    assert replay(trace, {0: "cpu", 1: "cpu"}, 0, offloaded={0: "cpu"}).peak == {"cpu": 110}


def test_weights_on_another_accelerator_that_are_read_between_units_are_copied_for_the_operation() -> None:
    trace = Trace((Enter(0), Allocate(0, 100), Leave(0), Allocate(1, 10, 0), OutsideUse(((0, 50), (1, 7)), 0), Free(0)))
    assert replay(trace, {1: 1}, 0).peak == {0: 117}
    assert replay(trace, {0: 1}, 0).peak == {1: 117}


def test_what_is_made_of_weights_alone_lies_where_they_do_and_is_copied_to_what_it_is_read_with() -> None:
    made = (OutsideUse(((0, 50), (1, 7)), alone=(0, 1)), Allocate(1, 20, weights=(0, 1)))
    trace = Trace((Allocate(0, 100), *made, Allocate(2, 100, 0, ((1, 20),)), Free(1), Free(0), Free(2)))
    assert replay(trace, {}, 0).peak == {0: 220}
    assert replay(trace, {0: 1, 1: 1}, 0).peak == {0: 220, 1: 20}
    assert replay(trace, {0: 1}, 0).peak == {0: 220, 1: 20}
    assert replay(trace, {1: 1}, 0, offloaded={0: "cpu"}).peak == {0: 220, 1: 50}
    within = Trace((Enter(1), Allocate(0, 100), *made, Allocate(2, 1, others=((1, 20),)), Free(1), Leave(1)))
    for events in (within, Trace(tuple(condense(within.events)))):
        assert replay(events, {0: 1}, 0).peak == {0: 121, 1: 20}


def test_a_tensor_brought_to_a_weight_is_copied_only_where_that_lies_elsewhere() -> None:
    trace = Trace((Allocate(0, 10), Allocate(1, 10, 0, brought_to=0), Free(0), Enter(0, ((1, 10),)), Leave(0), Free(1)))
    assert replay(trace, {}, 0).peak == {0: 10}
    assert replay(trace, {0: 1}, 0).peak == {0: 10, 1: 10}
    assert replay(trace, {}, 0, offloaded={0: "cpu"}).peak == {0: 10, "cpu": 10}
    for device in (0, 1):
        assert set(replay(trace, {0: device}, 0).now.values()) == {0}


def test_what_is_made_of_a_tensor_that_was_brought_to_the_host_counts_on_the_main_device_too() -> None:
    made = (Allocate(0, 10), Allocate(1, 10, 0, brought_to=0), Allocate(2, 20, 1, ((0, 10),)), Allocate(3, 40, 2))
    books = replay(Trace((*made, Enter(0, ((3, 40),)), Leave(0))), {}, 0, offloaded={0: "cpu"})
    assert books.peak == {0: 10 + 20 + 40, "cpu": 10 + 20 + 40}
    freed = replay(Trace((*made, *map(Free, range(4)))), {}, 0, offloaded={0: "cpu"})
    assert set(freed.now.values()) == {0}
    assert replay(Trace(made), {}, 0).peak == {0: 70}


def test_memory_that_is_shared_is_freed_with_the_last_storage_that_shares_it() -> None:
    shared = (Allocate(0, 10), Allocate(1, 10, 0, brought_to=0), Allocate(2, 10, 1, brought_to=0))
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        alive = [replay(Trace((*shared, *map(Free, order[:count]))), {}, 0).now[0] for count in range(4)]
        assert alive == [10, 10, 10, 0]


def test_a_host_that_runs_everything_has_no_copies() -> None:
    assert replay(CHAIN, {0: "cpu", 1: "cpu"}, "cpu").peak == {"cpu": 230}


def test_operations_between_units_run_on_the_device_of_their_source() -> None:
    trace = Trace((Enter(0), Allocate(0, 10), Leave(0), Allocate(1, 5, source=0), Allocate(2, 7)))
    assert replay(trace, {0: 1}, 0).now == {1: 15, 0: 7}


def test_initial_storages_are_on_the_device_of_their_unit() -> None:
    trace = Trace((Enter(1), Free(7), Leave(1)), (InitialStorage(7, 50, 1), InitialStorage(8, 20, 0)))
    books = replay(trace, {0: 0, 1: 1}, 0)
    assert books.peak == {1: 50, 0: 20}
    assert books.now == {1: 0, 0: 20}


def test_scratch_memory_counts_only_during_the_kernel() -> None:
    trace = Trace((Enter(0), Allocate(0, 10), Scratch(90), Allocate(1, 10), Leave(0)))
    books = replay(trace, {}, "cpu")
    assert books.peak == {"cpu": 100}
    assert books.now == {"cpu": 20}


def test_an_allocators_rounding_applies_to_every_storage() -> None:
    books = replay(CHAIN, {}, "gpu", rounding={"gpu": lambda n: -(-n // 64) * 64})
    assert books.peak == {"gpu": 128 + 64 + 128}


def test_kept_inputs_that_move_to_the_first_weights_and_back_count_twice() -> None:
    trace = Trace(
        (Allocate(0, 8), Call(fresh=((0, 8),), kept=((1, 40),)), Enter(0, ((0, 8), (1, 40))), Leave(0), Return()),
        (InitialStorage(1, 40, OUTSIDE),),
    )
    books = replay(trace, {}, 0, input_device="cpu")
    assert books.peak == {0: 40 + 8 + 40, "cpu": 48}
    assert books.now == {0: 40, "cpu": 8}  # those made for the call stay where they were brought
    assert replay(trace, {}, 0).peak == {0: 48}


def test_kept_inputs_that_lie_on_another_device_are_copied_for_the_call() -> None:
    """As the output of an encoder on one device, which `generate` keeps, is for each step of a decoder on another."""
    trace = Trace(
        (Enter(0), Allocate(0, 40), Leave(0), Call(kept=((0, 40),)), Enter(1, ((0, 40),)), Leave(1), Return()),
    )
    books = replay(trace, {0: 1}, 0)
    assert books.peak == {1: 40, 0: 40}
    assert books.now == {1: 40, 0: 0}
    assert replay(trace, {}, 0).peak == {0: 40}


def test_a_kept_input_that_the_call_frees_is_freed_with_its_copy() -> None:
    trace = Trace((Enter(0), Allocate(0, 40), Leave(0), Call(kept=((0, 40),)), Free(0), Return()))
    assert replay(trace, {0: 1}, 0).now == {1: 0, 0: 0}


def test_tensors_created_between_units_count_where_the_previous_output_is_and_where_the_inputs_are() -> None:
    made = (Allocate(0, 1), Call(), Allocate(1, 2), Enter(0), Leave(0), Allocate(2, 4), Return(), Allocate(3, 8))
    assert replay(Trace(made), {0: 1}, 0).now == {0: 1 + 2 + 4 + 8, 1: 4}
    assert replay(Trace((*made, Free(2))), {0: 1}, 0).now == {0: 1 + 2 + 8, 1: 0}


def test_what_is_made_of_such_tensors_alone_counts_on_both_devices_and_is_copied_to_neither() -> None:
    made = (Call(), Enter(0), Allocate(0, 1), Leave(0), Allocate(1, 2), Allocate(2, 4, 1), Allocate(3, 8, 0, ((2, 4),)))
    assert replay(Trace(made), {0: 1}, 0).now == {0: 2 + 4, 1: 1 + 2 + 4 + 8}
    for device in (0, 1):
        read = (Enter(1, ((1, 2), (2, 4))), Leave(1), Free(1), Free(2))
        books = replay(Trace((*made, *read)), {0: 1, 1: device}, 0)
        assert books.peak == {0: 6, 1: 15}
        assert books.now == {0: 0, 1: 9}


def test_inputs_from_another_device_are_copied_for_operations_between_units() -> None:
    trace = Trace((Enter(0), Allocate(0, 10), Leave(0), Allocate(1, 50), Allocate(2, 10, 0, ((1, 40),))))
    books = replay(trace, {0: 1}, 0)
    assert books.peak == {1: 10 + 40 + 10, 0: 50}
    assert books.now == {1: 20, 0: 50}
    assert replay(trace, {}, 0).peak == {0: 70}


def test_outputs_are_moved_to_the_device_of_the_inputs() -> None:
    trace = Trace((Call(), Enter(0), Allocate(0, 10), Allocate(1, 90), Leave(0), Return(((0, 10),)), Free(1)))
    books = replay(trace, {0: 1}, 0)
    assert books.peak == {1: 100, 0: 10}
    assert books.now == {1: 0, 0: 10}


def test_an_input_that_is_returned_stays_on_its_device() -> None:
    trace = Trace((Enter(0), Allocate(0, 10), Leave(0), Call(), Return(((0, 10),), frozenset({0}))))
    books = replay(trace, {0: 1}, 0)
    assert books.peak == {1: 10, 0: 10}
    assert books.now == {1: 10, 0: 0}


EXPERTS = Trace(
    (
        Enter(0),
        Route(0, RouterChoice(tokens=10, per_token=2, count=4), nbytes=100),
        Allocate(0, 400),
        Free(0),
        Allocate(1, 100),
        Routed(),
        Leave(0),
    )
)
"""10 tokens of 10 bytes go to 2 of 4 experts each; what is computed of them takes 400 bytes, what comes out 100."""


def test_cached_experts_take_the_bytes_of_slot_indices() -> None:
    numbers = 10 * 2 * 8
    assert replay(EXPERTS, {}, 0).peak == {0: 400}
    assert replay(EXPERTS, {}, 0, experts={(0, 0): 4}).peak == {0: 400 + numbers}
    assert replay(EXPERTS, {}, 0, experts={(0, 0): 7}).peak == {0: 400 + numbers + 3 * 8}


def test_slots_beyond_the_experts_take_no_row_counts_with_batched_mm() -> None:
    route = Route(0, RouterChoice(tokens=10, per_token=2, count=4), 100, "batched_mm")
    trace = Trace((Enter(0), route, Routed(), Leave(0)))
    assert replay(trace, {}, 0, experts={(0, 0): 7}).peak == {0: 10 * 2 * 8}


def test_calls_of_few_tokens_take_memory_of_the_host_that_computes_some_of_their_experts() -> None:
    route = EXPERTS.events[1]
    assert isinstance(route, Route)
    whole, events = replay(EXPERTS, {}, 0, experts={(0, 0): 4}), EXPERTS.events[2:5]
    divided = replay(EXPERTS, {}, 0, experts={(0, 0): 4}, split=(11, "cpu"))
    assert divided.peak == {
        0: split_call(route, 4).peak(route, events, int),
        "cpu": host_call(route).peak(route, events, int),
    }
    assert divided.now == {0: 100, "cpu": 0}
    assert replay(EXPERTS, {}, 0, experts={(0, 0): 4}, split=(10, "cpu")).peak == whole.peak


def test_experts_that_may_not_all_fit_take_the_peak_of_the_worst_routing() -> None:
    route = EXPERTS.events[1]
    assert isinstance(route, Route)
    calls = expert_calls(route, 2)
    books = replay(EXPERTS, {}, 0, experts={(0, 0): 2})
    assert books.peak == {0: max(call.peak(route, EXPERTS.events[2:5], int) for call in calls)}
    assert books.now == {0: 100}
