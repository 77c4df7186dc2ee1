from __future__ import annotations

import pytest

from bigmodel.benchmarks.fuzz_cases import BELOW, ENDS, EXACT, STREAMED, Outcome, fuzz, planned
from bigmodel.devices import virtual


def outcomes(*numbers: int, reserved: bool = False) -> list[Outcome]:
    virtual.enable(2)
    return [fuzz(number, 0, planned(number, 0, reserved), reserved) for number in numbers]


SMALL = (5, 12)
"""Cases of few layers, whose blocks are split: all resident, and streamed over two links."""


@pytest.fixture(scope="module")
def two() -> list[Outcome]:
    """Outcomes of two cases, run one after another."""
    return outcomes(*SMALL)


@pytest.mark.long
@pytest.mark.slow
def test_a_case_is_the_same_whatever_came_before_it(two: list[Outcome]) -> None:
    assert outcomes(SMALL[1]) == two[1:]


@pytest.mark.slow
def test_random_models_keep_random_budgets(two: list[Outcome]) -> None:
    assert [outcome.kind for outcome in two] == [EXACT, STREAMED]


@pytest.mark.slow
def test_random_models_keep_random_budgets_of_reserved_bytes() -> None:
    kinds = {outcome.kind for outcome in outcomes(5, reserved=True)}
    assert kinds <= {EXACT, STREAMED, BELOW, ENDS}, "it runs on an accelerator"
