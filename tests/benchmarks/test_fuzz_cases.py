from __future__ import annotations

import pytest

from bigmodel.benchmarks.fuzz_cases import BELOW, ENDS, EXACT, HOST_ALONE, REFUSED, STREAMED, Outcome, fuzz, planned
from bigmodel.devices import virtual


def outcomes(*numbers: int, reserved: bool = False) -> list[Outcome]:
    virtual.enable(2)
    return [fuzz(number, 0, planned(number, 0, reserved), reserved) for number in numbers]


@pytest.fixture(scope="module")
def first_two() -> list[Outcome]:
    """Outcomes of the first cases, run one after another."""
    return outcomes(*range(2))


@pytest.mark.slow
def test_a_case_is_the_same_whatever_came_before_it(first_two: list[Outcome]) -> None:
    assert outcomes(1) == first_two[1:]


@pytest.mark.slow
def test_random_models_keep_random_budgets(first_two: list[Outcome]) -> None:
    kinds = {outcome.kind for outcome in first_two}
    assert kinds <= {EXACT, STREAMED, BELOW, REFUSED, HOST_ALONE}


@pytest.mark.slow
def test_random_models_keep_random_budgets_of_reserved_bytes() -> None:
    kinds = {outcome.kind for outcome in outcomes(5, 9, reserved=True)}
    assert kinds <= {EXACT, STREAMED, BELOW, ENDS}, "both run on an accelerator"
