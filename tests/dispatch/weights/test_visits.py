"""Visits are left whatever interrupts them, and the order of visits is learned."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.dispatch.weights.visits import Visited, VisitOrder

from ..interrupting import interrupted_at


def test_at_first_the_given_order_is_the_guess_and_after_the_last_comes_the_first() -> None:
    order = VisitOrder(["a", "b", "c"])
    assert order.after("a", 1) == ["b"]
    assert order.after("c", 5) == ["a", "b"]


def test_the_block_visited_after_another_is_expected_after_it() -> None:
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


class Counted(Visited[int, int]):
    """Holds as many things as are asked for; leaving fails the first `failures` times, before or after the work."""

    def __init__(self, failures: int = 0, after: bool = False) -> None:
        self.users, self.failures, self.after = 0, failures, after
        self.start()

    def _enter(self, request: int, held: list[int]) -> None:
        with self._lock:
            self.users += request
            held.append(request)

    def _leave(self, held: list[int]) -> None:
        with self._lock:
            if not self.after:
                self._fail()
            if held:
                self.users -= held[0]
                del held[:]
            self._fail()

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise KeyboardInterrupt


def test_a_visit_holds_what_it_asks_for_and_nothing_afterwards() -> None:
    counted = Counted()
    assert counted.visit(3, lambda held: (counted.users, list(held))) == (3, [3])
    with counted.use(2) as held:
        assert (counted.users, held) == (2, [2])
    assert counted.users == 0


def test_a_visit_that_raises_is_left() -> None:
    counted = Counted()
    with pytest.raises(ZeroDivisionError):
        counted.visit(1, lambda _: 1 / 0)
    assert counted.users == 0


@pytest.mark.parametrize("after", [False, True])
def test_leaving_is_done_again_when_it_is_interrupted(after: bool) -> None:
    counted = Counted(failures=1, after=after)
    with pytest.raises(KeyboardInterrupt):
        counted.visit(1, lambda held: held)
    assert counted.users == 0


def test_an_interrupt_at_any_moment_of_a_visit_leaves_nothing_held() -> None:
    counted = Counted()
    number = 0
    while interrupted_at(number, lambda: counted.visit(1, lambda _: counted.visit(1, len))):
        assert counted.users == 0, number
        number += 1
    assert number > 10


def test_a_visit_starts_what_is_not_started_in_this_process() -> None:
    counted = Counted()
    counted.is_started = False
    assert counted.visit(1, len) == 1
    assert counted.is_started
