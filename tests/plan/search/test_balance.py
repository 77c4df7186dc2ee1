"""Cutting a sequence of groups such that the slowest accelerator takes least."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigmodel.plan.search.balance import Share, even_cuts
from tests.examples import few


def taken(nbytes: list[int], shares: list[Share], cuts: list[int]) -> tuple[list[float], bool]:
    """The seconds of each accelerator under a division, and whether it fits."""
    bounds = [0, *cuts, len(nbytes)]
    ranges = list(pairwise(bounds))
    seconds = [share.begun + sum(share.seconds[a:b]) for share, (a, b) in zip(shares, ranges, strict=True)]
    fits = all(sum(nbytes[a:b]) <= share.room for share, (a, b) in zip(shares, ranges, strict=True))
    return seconds, fits


def slow_cuts(nbytes: list[int], shares: list[Share]) -> float | None:
    """The least seconds of the slowest accelerator over all divisions."""
    found = []
    for cuts in combinations_with_replacement(range(len(nbytes) + 1), len(shares) - 1):
        seconds, fits = taken(nbytes, shares, list(cuts))
        if fits:
            found.append(max(seconds))
    return min(found, default=None)


@pytest.mark.slow
@settings(max_examples=few(60))
@given(data=st.data())
def test_no_other_division_is_faster(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 7))
    nbytes = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    several = data.draw(st.integers(1, 4))
    seconds = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    shares = [
        Share(data.draw(seconds), data.draw(st.integers(0, 20)), float(data.draw(st.integers(0, 9))))
        for _ in range(several)
    ]
    cuts, least = even_cuts(nbytes, shares), slow_cuts(nbytes, shares)
    assert (cuts is None) == (least is None)
    if cuts is not None and least is not None:
        found, fits = taken(nbytes, shares, cuts)
        assert fits
        assert max(found) == pytest.approx(least)


def test_each_takes_nearest_to_the_mean() -> None:
    def alike(several: int, count: int) -> list[int] | None:
        return even_cuts([1] * count, [Share([1.0] * count, count)] * several)

    assert alike(2, 8) == [4]
    assert alike(4, 9) == [2, 4, 6]  # three would do, and leave one idle
    assert alike(3, 2) is not None


def test_what_is_there_already_and_slower_devices_count() -> None:
    ones = [1.0] * 8
    assert even_cuts([1] * 8, [Share(ones, 8, begun=4.0), Share(ones, 8)]) == [2]
    assert even_cuts([1] * 8, [Share(ones, 8), Share([3.0] * 8, 8)]) == [6]


def test_room_bounds_what_an_accelerator_takes() -> None:
    ones = [1.0] * 8
    assert even_cuts([1] * 8, [Share(ones, 2), Share(ones, 8)]) == [2]
    assert even_cuts([1] * 8, [Share(ones, 2), Share(ones, 5)]) is None
    assert even_cuts([1] * 8, [Share(ones, -1), Share(ones, 8)]) is None
