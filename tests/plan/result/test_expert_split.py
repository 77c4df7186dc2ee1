"""Missing experts divided between the link and the host: both end as early as they can."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.plan.result.expert_split import NEARLY, ExpertSplit

seconds = st.floats(1e-6, 1.0)
splits = st.builds(ExpertSplit, seconds, seconds, st.floats(0.0, 1.0), st.just(2))


def ends(split: ExpertSplit, fetched: int, computed: int) -> float:
    """The slow twin: when the link and the host have both ended."""
    return (split.start if computed else 0.0) + max(fetched * split.fetch, computed * split.compute)


@given(splits, st.integers(0, 12))
def test_no_other_division_ends_much_earlier_and_none_as_fast_fetches_more(split: ExpertSplit, missing: int) -> None:
    found = split.on_host(missing)
    least = min(ends(split, missing - computed, computed) for computed in range(missing + 1))
    assert ends(split, missing - found, found) == split.seconds(missing, found) <= NEARLY * least
    assert all(ends(split, missing - fewer, fewer) > NEARLY * least for fewer in range(found))


@given(splits, st.integers(1, 4), st.floats(0.0, 1.0))
def test_expected_seconds_are_the_mean_over_all_contents_of_the_cache(
    split: ExpertSplit, chosen: int, share: float
) -> None:
    mean = computed = 0.0
    for cached in product((False, True), repeat=chosen):
        weight = 1.0
        for each in cached:
            weight *= 1 - share if each else share
        missing = cached.count(False)
        mean += weight * split.seconds(missing, split.on_host(missing))
        computed += weight * split.on_host(missing)
    assert split.expected(chosen, share * chosen) == pytest.approx((mean, computed))


def test_a_fast_link_fetches_all_and_a_slow_one_none() -> None:
    assert ExpertSplit(fetch=1.0, compute=10.0, start=0.0, below=2).on_host(4) == 0
    assert ExpertSplit(fetch=10.0, compute=1.0, start=0.0, below=2).on_host(4) == 4
    assert ExpertSplit(fetch=1.0, compute=1.0, start=0.0, below=2).on_host(4) == 2
