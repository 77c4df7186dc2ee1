"""Medians, quartiles, and ratios of samples taken in the same rounds."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigmodel.benchmarks.harness import quartiles, ratio, summarise

positive = st.floats(min_value=1e-6, max_value=1e6)


@given(st.lists(positive, min_size=1, max_size=30))
def test_quartiles_are_those_of_numpy(values: list[float]) -> None:
    assert quartiles(values) == pytest.approx(tuple(numpy.percentile(values, [25, 50, 75])))


def test_a_summary_tells_middle_ends_and_size() -> None:
    found = summarise([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.first_quartile, found.median, found.third_quartile) == (2.0, 3.0, 4.0)
    assert (found.lowest, found.highest, found.count) == (1.0, 5.0, 5)


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        summarise([])


def test_a_ratio_is_that_of_the_medians_and_its_quartiles_those_of_the_rounds() -> None:
    # The machine became three times slower for everybody, and the ratio within each round is the same.
    found = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.median, found.first_quartile, found.third_quartile) == (2.0, 2.0, 2.0)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=20))
def test_a_ratio_of_medians_lies_between_the_extreme_ratios(pairs: list[tuple[float, float]]) -> None:
    values, baseline = [a for a, _ in pairs], [b for _, b in pairs]
    found = ratio(values, baseline)
    assert min(values) / max(baseline) * 0.999 <= found.median <= max(values) / min(baseline) * 1.001


def test_samples_of_different_rounds_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="same rounds"):
        ratio([1.0], [1.0, 2.0])
