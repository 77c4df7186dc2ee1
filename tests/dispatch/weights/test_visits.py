"""Visits are left whatever interrupts them, the order of visits is learned, and they are counted."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.dispatch.weights import visits
from bigmodel.dispatch.weights.visits import StreamStats, Visited, VisitOrder, together

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


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(visits.time, "perf_counter", lambda: self.now)


def test_reading_by_several_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stats = StreamStats()
    with stats.reading():
        clock.now = 1
        with stats.reading():
            clock.now = 3
    clock.now = 10
    with stats.reading():
        clock.now = 11
    assert stats.seconds_reading == 4


def test_rates_are_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    stats = StreamStats()
    assert (stats.hit_rate, stats.link_busy) == (0, 0)
    stats.hits, stats.misses = 3, 1
    stats.add_link_seconds(2.0)
    clock.now = 8
    assert stats.as_dict()["hit_rate"] == 0.75
    assert stats.as_dict()["link_busy"] == 0.25
    stats.reset()
    assert set(stats.as_dict().values()) == {0}


def test_threads_may_count_together() -> None:
    stats = StreamStats()

    def count() -> None:
        for _ in range(1000):
            stats.add(from_disk=1)
            stats.add_fetch()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.bytes_from_disk == stats.fetches == 4000


def test_bytes_that_reach_one_device_in_several_ways_are_added_up() -> None:
    one, other = StreamStats(), StreamStats()
    one.add_fetch(3)
    one.hits, one.misses = 1, 1
    other.add(from_disk=5)
    other.add_fetch()
    other.add_fetch()
    other.hits, other.misses = 2, 0
    total = together([one, other])
    assert (total["bytes_from_ram"], total["bytes_from_disk"], total["fetches"]) == (3, 5, 3)
    assert total["hit_rate"] == 0.75
    assert together([one])["hit_rate"] == one.hit_rate
