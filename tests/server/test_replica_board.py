"""The board knows what each replica said last, and which of them are still there."""

from __future__ import annotations

from bigmodel.server.replica_board import Board, Word


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


ONE, TWO, THREE = (Word(metrics, {}) for metrics in ("one", "two", "three"))


def test_the_last_word_of_each_replica_counts() -> None:
    board = Board(Clock())
    board.put("a", ONE)
    board.put("b", TWO)
    board.put("a", THREE)
    assert board.words() == ({"a": THREE, "b": TWO}, {})


def test_who_is_silent_is_gone_and_comes_back_with_a_word() -> None:
    clock = Clock()
    board = Board(clock)
    board.put("a", ONE)
    clock.now += 9
    board.put("b", TWO)
    clock.now += 9
    assert board.words() == ({"b": TWO}, {"a": ONE})
    board.put("a", THREE)
    assert board.words() == ({"a": THREE, "b": TWO}, {})
