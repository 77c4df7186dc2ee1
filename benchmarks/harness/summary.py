"""Summary statistics: medians, quartiles, and ratios of medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Median, quartiles, minimum, maximum and size of a sample."""

    median: float
    first_quartile: float
    third_quartile: float
    lowest: float
    highest: float
    count: int


def summarise(values: Sequence[float]) -> Summary:
    """Return the summary of a sample.

    Raises:
        ValueError: The sample is empty.
    """
    low, middle, high = quartiles(values)
    return Summary(middle, low, high, min(values), max(values), len(values))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile, with linear interpolation.

    Raises:
        ValueError: The sample is empty.
    """
    if not values:
        raise ValueError("an empty sample has no quartiles")
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def ratio(values: Sequence[float], baseline: Sequence[float]) -> Summary:
    """Compare two samples taken in the same rounds.

    Returns:
        The median is the ratio of the two medians. Quartiles, minimum and maximum are those of the ratios within each
        round, which show how the difference compares with the drift of the machine.

    Raises:
        ValueError: The samples are empty or of different lengths.
    """
    if len(values) != len(baseline):
        raise ValueError(f"{len(values)} and {len(baseline)} values do not come from the same rounds")
    paired = summarise([value / base for value, base in zip(values, baseline)])
    of_medians = statistics.median(values) / statistics.median(baseline)
    return Summary(
        of_medians, paired.first_quartile, paired.third_quartile, paired.lowest, paired.highest, paired.count
    )
