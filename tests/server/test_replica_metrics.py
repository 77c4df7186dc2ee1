"""The board knows what each replica said last, and which of them are still there."""

from __future__ import annotations

from server.replica_metrics import Board


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_last_word_of_each_replica_counts() -> None:
    board = Board(Clock())
    board.put("a", "one")
    board.put("b", "two")
    board.put("a", "three")
    assert board.texts() == (["three", "two"], [])


def test_who_is_silent_is_gone_and_comes_back_with_a_word() -> None:
    clock = Clock()
    board = Board(clock)
    board.put("a", "one")
    clock.now += 9
    board.put("b", "two")
    clock.now += 9
    assert board.texts() == (["two"], ["one"])
    board.put("a", "three")
    assert board.texts() == (["three", "two"], [])
