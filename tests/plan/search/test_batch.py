"""The batch that generates most tokens per second, beside every batch tried one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bigmodel.errors import BudgetError
from bigmodel.plan import Plan, plan
from bigmodel.plan.result.plan import Prediction
from bigmodel.plan.search.batch import WITHOUT_PREDICTION, best_batch

from ...profile.models import tiny_llama
from ..machines import machine

SHAPES: dict[str, Any] = {"context_length": 32, "new_tokens": 8}
MACHINE = machine(link=1e8, host=4e-9)


@cache
def some_plan() -> Plan:
    return plan(tiny_llama(), {"cpu": "1GB"}, **SHAPES, machine=MACHINE)


def with_rate(size: int, rate: float) -> Plan:
    """A plan of `size` sequences that generates `rate` tokens per second."""
    return replace(some_plan(), batch_size=size, new_tokens=1, prediction=Prediction(size / rate, 1.0, "the link"))


def rate(found: Plan) -> float:
    assert found.tokens_per_second is not None
    return found.tokens_per_second


@pytest.mark.parametrize("peak", [1, 2, 3, 5, 8, 13, 21, 40, 64, 100])
def test_the_best_batch_is_found_where_throughput_rises_and_falls(peak: int) -> None:
    def plan_at(size: int) -> Plan:
        return with_rate(size, 100 / (1 + abs(size - peak) / peak))

    found = best_batch(plan_at)
    best = rate(plan_at(peak))
    assert rate(found) >= 0.95 * best


@pytest.mark.parametrize("most", [1, 2, 6, 7, 12, 25])
def test_the_largest_batch_that_fits_is_found_where_throughput_only_rises(most: int) -> None:
    tried: list[int] = []

    def plan_at(size: int) -> Plan:
        tried.append(size)
        if size > most:
            raise BudgetError("does not fit")
        return with_rate(size, float(size))

    assert 0.85 * most <= best_batch(plan_at).batch_size <= most
    assert len(tried) == len(set(tried)), "each size is planned once"


@pytest.mark.parametrize("flat_from", [4, 40, 64])
def test_a_batch_is_not_doubled_for_next_to_nothing(flat_from: int) -> None:
    tried: list[int] = []

    def plan_at(size: int) -> Plan:
        tried.append(size)
        return with_rate(size, float(min(size, flat_from)) + 1e-5 * size)

    found = best_batch(plan_at)
    assert rate(found) >= 0.99 * flat_from
    assert found.batch_size <= 2 * flat_from
    assert max(tried) <= 8 * flat_from


def test_no_batch_larger_than_the_limit_is_tried() -> None:
    assert best_batch(lambda size: with_rate(size, float(size)), most=8).batch_size == 8


def test_the_error_of_a_single_sequence_is_raised() -> None:
    with pytest.raises(BudgetError, match="fit"):
        plan(tiny_llama(), {"cpu": "1KB"}, objective="throughput", machine=MACHINE, **SHAPES)


def test_without_a_prediction_one_sequence_is_planned_and_the_plan_says_so() -> None:
    found = best_batch(lambda size: replace(some_plan(), batch_size=size, prediction=None))
    assert found.batch_size == 1
    assert WITHOUT_PREDICTION in found.notes


@pytest.mark.usefixtures("accelerators")
class TestPlan:
    model = tiny_llama(num_hidden_layers=4, hidden_size=128, intermediate_size=256)

    def at(self, budget: int, **options: Any) -> Plan:
        return plan(self.model, {0: budget, "cpu": "1GB"}, objective="throughput", machine=MACHINE, **SHAPES, **options)

    @pytest.mark.long
    @pytest.mark.slow
    def test_throughput_chooses_a_batch_at_least_as_fast_as_every_fixed_one(self) -> None:
        budget = int(0.8 * sum(parameter.nbytes for parameter in self.model.parameters()))
        found = self.at(budget)
        fixed = []
        for size in (1, 16):
            try:
                fixed.append(rate(self.at(budget, batch_size=size)))
            except BudgetError:
                break
        assert found.batch_size > 1
        assert rate(found) >= 0.97 * max(fixed)
        assert found.devices[0].total <= budget

    @pytest.mark.slow
    def test_a_batch_that_is_given_is_kept(self) -> None:
        assert self.at(10**8, batch_size=3).batch_size == 3

    @pytest.mark.slow
    def test_other_objectives_plan_one_sequence(self) -> None:
        assert plan(self.model, {0: 10**8, "cpu": "1GB"}, machine=MACHINE, **SHAPES).batch_size == 1
