from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.devices.virtual.allocator import rounded
from bigmodel.limits import MOST_GROUPS
from bigmodel.profile.model.experts import RouterChoice
from bigmodel.profile.trace.events import Allocate, Free, Route, Scratch
from bigmodel.profile.trace.expert_calls import chunk_rows, expert_calls, host_call, split_call

ROUTE = Route(0, RouterChoice(tokens=10, per_token=2, count=4), nbytes=160, itemsize=4, weight_itemsize=4)
"""10 tokens of 4 float32 numbers, each going to 2 of 4 experts."""


def most_rows_in_a_chunk(tokens: int, per_token: int, experts: int, slots: int) -> int:
    """Try every routing."""
    size, most = max(1, slots // 2), 0
    choices = [
        c for c in product(range(experts), repeat=per_token) if len(set(c)) == per_token and list(c) == sorted(c)
    ]
    for routing in product(choices, repeat=tokens):
        chosen = sorted({expert for token in routing for expert in token})
        if len(chosen) <= slots:
            continue
        for start in range(0, len(chosen), size):
            chunk = chosen[start : start + size]
            most = max(most, sum(expert in chunk for token in routing for expert in token))
    return most


@pytest.mark.parametrize(
    ("tokens", "per_token", "experts", "slots"),
    [(3, 2, 4, 1), (3, 2, 4, 2), (3, 2, 4, 3), (4, 1, 4, 1), (4, 1, 4, 2), (4, 1, 4, 3), (3, 3, 4, 2), (3, 3, 4, 3)],
)
def test_the_bound_of_chunk_rows_is_tight(tokens: int, per_token: int, experts: int, slots: int) -> None:
    route = Route(0, RouterChoice(tokens, per_token, experts))
    assert chunk_rows(route, slots) == most_rows_in_a_chunk(tokens, per_token, experts, slots)


def test_experts_that_always_fit_are_called_at_once() -> None:
    (call,) = expert_calls(ROUTE, 4)
    assert (call.rows, call.per_token) == (20, 2)


def test_experts_that_may_fit_are_called_at_once_or_in_chunks() -> None:
    at_once, chunk = expert_calls(ROUTE, 3)
    assert (at_once.rows, at_once.per_token) == (20, 2)
    assert (chunk.rows, chunk.per_token) == (10, 1)


def test_experts_that_never_fit_are_called_in_chunks() -> None:
    (chunk,) = expert_calls(ROUTE, 1)
    assert (chunk.rows, chunk.per_token) == (10, 1)


def test_more_slots_than_one_call_takes_are_called_in_chunks() -> None:
    (chunk,) = expert_calls(ROUTE, MOST_GROUPS + 1)
    assert (chunk.rows, chunk.per_token, chunk.experts) == (20, 1, MOST_GROUPS)


def test_the_products_of_all_rows_are_alive_beside_a_chunk() -> None:
    (chunk,) = expert_calls(ROUTE, 1)
    products = 20 * 16
    assert sum(chunk.beside) == products + 10 * (16 + 4 + 8 + 8)
    assert sum(chunk.after) == 2 * products + 160


def test_tensors_have_the_size_of_a_chunk_by_row_token_or_expert() -> None:
    (chunk,) = expert_calls(ROUTE, 1)
    assert chunk.bytes_of(20 * 100, ROUTE) == 10 * 100
    assert chunk.bytes_of(160, ROUTE) == 160
    assert chunk.bytes_of(4 * 4, ROUTE) == 4


def test_gathering_copies_the_shares_of_all_rows_at_once() -> None:
    choice = RouterChoice(tokens=1, per_token=2, count=4)
    route = Route(0, choice, 16, "batched_mm", 4, 4, expert_tensors=(1000, 500))
    (call,) = expert_calls(route, 1)
    assert call.peak(route, [Allocate(0, 2000), Free(0), Allocate(1, 1000), Free(1)], int) == 3000


def test_tensors_as_large_as_a_gathered_copy_are_counted_beside_it() -> None:
    """The tokens of the rows, before the copies, and a product after them, as with biases of as many numbers."""
    choice = RouterChoice(tokens=1, per_token=2, count=4)
    route = Route(0, choice, 16, "batched_mm", 4, 4, expert_tensors=(1000, 50))
    (call,) = expert_calls(route, 1)
    tokens, weights, biases, product = (Allocate(number, size) for number, size in enumerate((100, 2000, 100, 100)))
    assert call.peak(route, [tokens, weights, biases, product], int) == 100 + 2000 + 100 + 100
    assert call.peak(route, [tokens, Free(0), weights, Free(1), biases, product], int) == 2000 + 100


def test_experts_that_are_viewed_on_the_host_are_not_copied_for_each_row() -> None:
    """As "batched_mm" copies them, whose calls were recorded."""
    route = replace(ROUTE, implementation="batched_mm", expert_tensors=(1000,))
    copied = [Allocate(0, 20 * 1000), Free(0)]
    assert host_call(route).peak(route, copied, int) == host_call(route).peak(route, [], int)
    products, own, tokens = 20 * 16, 20 * (16 + 4 + 8 + 8), 160
    assert host_call(route).peak(route, [], int) == products + own + tokens


def test_products_from_the_host_arrive_beside_those_of_the_device() -> None:
    assert sum(split_call(ROUTE, 4).beside) == 20 * 16 + 20 * (16 + 4 + 8 + 8) + 20 * (16 + 8)


@given(st.lists(st.integers(1, 2000), max_size=5), st.lists(st.integers(1, 2000), max_size=5))
def test_a_call_gives_back_all_that_it_takes(made: list[int], scratch: list[int]) -> None:
    events = [*(Allocate(number, nbytes) for number, nbytes in enumerate(made)), *map(Scratch, scratch), Free(0)]
    for slots in (1, 3, 8):
        for call in expert_calls(ROUTE, slots):
            assert sum(call.changes(ROUTE, events, rounded)) == 0
            assert call.peak(ROUTE, events, rounded) >= call.peak(ROUTE, events, int)


def test_the_eager_function_takes_the_recorded_bytes() -> None:
    route = Route(0, ROUTE.choice, 160, "eager")
    (call,) = expert_calls(route, 1)
    assert call.peak(route, [Allocate(0, 400), Free(0), Allocate(1, 160)], int) == 400
