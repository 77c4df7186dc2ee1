from __future__ import annotations

import pytest

from bigmodel.benchmarks.fuzz_cases import BELOW, EXACT, HOST_ALONE, REFUSED, STREAMED, Outcome, fuzz, planned
from bigmodel.devices import virtual


def outcomes(*numbers: int) -> list[Outcome]:
    virtual.enable(2)
    return [fuzz(number, 0, planned(number, seed=0)) for number in numbers]


@pytest.mark.slow
def test_a_case_is_the_same_whatever_came_before_it() -> None:
    assert outcomes(1, 2)[1:] == outcomes(2)


@pytest.mark.slow
def test_random_models_keep_random_budgets() -> None:
    kinds = {outcome.kind for outcome in outcomes(*range(6))}
    assert kinds <= {EXACT, STREAMED, BELOW, REFUSED, HOST_ALONE}
