"""What is read is divided into what is fetched, each position once, and what repeats it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.server.engine.kv.reading import Attended, Part, Reading, Repeat, consecutive, divided

Runs = list[tuple[int, int]]


@pytest.mark.parametrize(
    ("rows", "runs"),
    [([4], [(4, 5)]), ([4, 5, 6], [(4, 7)]), ([4, 5, 9, 1, 2], [(4, 6), (9, 10), (1, 3)]), ([2, 1], [(2, 3), (1, 2)])],
)
def test_consecutive_rows_are_copied_together(rows: list[int], runs: Runs) -> None:
    assert consecutive(torch.tensor(rows)) == runs


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=6))
def test_each_position_is_fetched_once_and_all_places_are_filled(drawn: Runs) -> None:
    runs: list[Part] = []
    rows: list[int] = []
    for begin, count in drawn:
        runs.append(Part(len(rows), begin, begin + count))
        rows += range(begin, begin + count)
    parts, repeats = divided(runs)
    found: dict[int, int] = {at + i: begin + i for at, begin, end in parts for i in range(end - begin)}
    assert len(found) == len(set(found.values())) == sum(end - begin for _, begin, end in parts)
    for at, of, count in repeats:
        assert not found.keys() & set(range(at, at + count))
        found |= {at + i: found[of + i] for i in range(count)}
    assert [found[place] for place in range(len(rows))] == rows


def test_blocks_of_one_prompt_share_what_is_before_them() -> None:
    reading = Reading(torch.tensor([7, 8, 9, 7, 8, 9, 10]), ())
    assert reading.parts == ([Part(0, 7, 10), Part(6, 10, 11)], [Repeat(3, 0, 3)])


def test_rows_that_the_step_computes_are_not_fetched() -> None:
    own = (
        Attended(torch.tensor([7, 8, 9]), 1, 0),
        Attended(torch.tensor([7, 8, 3, 4]), 2, 1),
        Attended(torch.tensor([5]), 1),
    )
    reading = Reading.of(own)
    assert reading.parts == ([Part(0, 7, 9)], [Repeat(3, 0, 2)])
    assert [each.tolist() for each in reading.places] == [[2, 5, 6, 7], [0, 1, 2, 0]]


def test_readings_that_fetch_the_same_to_the_same_places() -> None:
    reading = Reading.of([Attended(torch.tensor([7, 8, 9]), 1), Attended(torch.tensor([4, 5]), 1)])
    assert reading.fetches(Reading.of([Attended(torch.tensor([7, 8, -1]), 1), Attended(torch.tensor([4, -1]), 1)]))
    assert not reading.fetches(Reading.of([Attended(torch.tensor([7, 8, 9]), 1)]))
    assert not reading.fetches(Reading.of([Attended(torch.tensor([4, 5]), 1), Attended(torch.tensor([7, 8, 9]), 1)]))
    assert not reading.fetches(Reading.of([Attended(torch.tensor([7, 8, 9]), 1), Attended(torch.tensor([6, 5]), 1)]))
