"""Which blocks are expected after which."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from bigmodel.dispatch.weights.visits import VisitOrder


def test_at_first_the_given_order_is_the_guess_and_after_the_last_comes_the_first() -> None:
    order = VisitOrder(["a", "b", "c"])
    assert order.after("a", 1) == ["b"]
    assert order.after("c", 5) == ["a", "b"]


def test_what_was_visited_after_a_block_is_expected_after_it() -> None:
    order = VisitOrder(["a", "b", "c", "d"])
    for name in "acbd":
        order.visit(name)
    assert order.after("a", 9) == ["c", "b", "d"]


def test_a_block_that_is_visited_twice_running_is_still_followed_by_the_next() -> None:
    order = VisitOrder(["a", "b", "c"])
    for name in "aabb":
        order.visit(name)
    assert order.after("a", 9) == ["b", "c"]


def test_a_block_that_was_not_given_is_learned_like_any_other() -> None:
    order = VisitOrder(["a", "b"])
    assert order.after("around", 9) == []
    for name in ("around", "a", "b", "around"):
        order.visit(name)
    assert order.after("around", 9) == ["a", "b"]


def test_threads_that_take_turns_do_not_mix_their_orders_up_and_are_told_that_they_do() -> None:
    order = VisitOrder(["a", "b", "c"])
    assert order.visit("a")
    alone: list[bool] = []
    other = threading.Thread(target=lambda: alone.append(order.visit("c")))
    other.start()
    other.join()
    assert alone == [False]
    assert not order.visit("b")
    assert order.visit("c")
    assert order.after("a", 1) == ["b"], "what another thread visited in between says nothing"


@given(visits=st.lists(st.integers(0, 6), max_size=60), block=st.integers(0, 6), most=st.integers(0, 9))
def test_each_block_is_expected_at_most_once_and_never_the_one_itself(visits: list[int], block: int, most: int) -> None:
    order = VisitOrder(list(range(7)))
    for visited in visits:
        order.visit(visited)
    found = order.after(block, most)
    assert len(found) == len(set(found)) <= most
    assert block not in found
