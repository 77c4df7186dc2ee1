"""What a model needs of the budgets: its plan for all of them, or for what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from bigmodel.errors import BudgetError
from bigmodel.plan import DevicePlan, Part, Plan
from bigmodel.server import EngineOptions, Loaded, Loading
from bigmodel.server.loading import PlannedModel
from bigmodel.server.models.policy import Key
from bigmodel.server.models.running import RunningModel
from bigmodel.server.models.served import KEPT_PLANS, ServedModel

ALL: Mapping[Key, int] = {0: 100, "cpu": 1000}


class Source(PlannedModel):
    """A model of ten parts of ten bytes, which the host holds where the accelerator has no place."""

    def __init__(self, parts: int = 10) -> None:
        super().__init__("a", {})
        self.parts = parts
        self.planned: list[Mapping[Key, int]] = []
        self.loaded: Plan | None = None

    def plan(self, budgets: Mapping[Key, int]) -> Plan:
        self.planned.append(dict(budgets))
        resident = min(self.parts, budgets[0] // 10)
        rest = self.parts - resident
        if rest * 10 > budgets["cpu"]:
            raise BudgetError("it does not fit")
        parts = tuple(Part(f"{number}", 0 if number < resident else "cpu", 0, 10, "") for number in range(self.parts))
        devices: dict[Key, DevicePlan] = {
            0: DevicePlan(0, budgets[0], weights=10 * resident),
            "cpu": DevicePlan("cpu", budgets["cpu"], weights=10 * rest),
        }
        return Plan("Tiny", "auto", 0, MappingProxyType(devices), parts, resident_limit=budgets["cpu"])

    def load(self, plan: Plan, progress: Loading) -> Loaded:
        self.loaded = plan
        raise RuntimeError("no further")


def test_what_its_best_plan_takes_is_enough() -> None:
    source = Source(parts=6)
    model = ServedModel("a", source)
    assert model.enough(ALL, {0: 60, "cpu": 0})
    assert not model.enough(ALL, {0: 59, "cpu": 1000})  # it would be streamed
    assert source.planned == [ALL, {0: 59, "cpu": 1000}]


def test_one_that_is_streamed_anyway_takes_a_little_less() -> None:
    model = ServedModel("a", Source(parts=20))
    assert model.enough(ALL, {0: 80, "cpu": 1000})  # 120 bytes are fetched instead of 100
    assert not model.enough(ALL, {0: 60, "cpu": 1000})
    assert not model.enough(ALL, {0: 80, "cpu": 100})


def test_one_that_not_even_all_is_enough_for_is_an_error() -> None:
    with pytest.raises(BudgetError):
        ServedModel("a", Source(parts=200)).enough(ALL, ALL)


@pytest.mark.parametrize(("left", "resident"), [({0: 100, "cpu": 1000}, 10), ({0: 80, "cpu": 900}, 8)])
def test_it_is_loaded_as_planned_within_the_process_s_memory(left: Mapping[Key, int], resident: int) -> None:
    source = Source(parts=20)
    model = ServedModel("a", source, start=lambda loaded, options: pytest.fail("nothing was loaded"))
    with pytest.raises(RuntimeError, match="no further"):
        model.load(ALL, left, lambda: True)
    assert model.claimed == {0: 10 * resident, "cpu": 200 - 10 * resident}
    assert source.loaded is not None
    assert source.loaded.resident_limit == ALL["cpu"]


def test_what_its_adapters_take_is_claimed_of_each_device() -> None:
    source = Source(parts=6)
    source.adapters_bytes = 7
    model = ServedModel("a", source, start=lambda loaded, options: pytest.fail("nothing was loaded"))
    with pytest.raises(RuntimeError, match="no further"):
        model.load(ALL, ALL, lambda: True)
    assert model.claimed == {0: 67, "cpu": 7}


def test_the_latest_plans_are_kept_and_that_for_all_budgets() -> None:
    source = Source(parts=20)
    model = ServedModel("a", source)
    for less in range(2 * KEPT_PLANS):
        model.enough(ALL, {0: 99 - less, "cpu": 1000})
    planned = len(source.planned)
    model.enough(ALL, {0: 99 - less, "cpu": 1000})
    assert len(source.planned) == planned == 2 * KEPT_PLANS + 1


class Made:
    """Stands for a model that generates text, or does not."""

    config = None

    def __init__(self, generates: bool) -> None:
        self.can_generate = lambda: generates


@pytest.mark.parametrize(("generates", "folder"), [(True, Path("kept")), (False, None)])
def test_its_engine_has_the_options_of_its_kind_and_context(generates: bool, folder: Path | None) -> None:
    class Short(Source):
        def load(self, plan: Plan, progress: Loading) -> Loaded:
            return Loaded(Made(generates), None, replace(plan, context_length=64))

    def start(loaded: Loaded, options: EngineOptions) -> RunningModel:
        assert (options.max_length, options.prefix_folder) == (64, folder)
        raise RuntimeError("no further")

    model = ServedModel("a", Short(), start, EngineOptions(max_length=100, prefix_folder=Path("kept")))
    with pytest.raises(RuntimeError, match="no further"):
        model.load(ALL, ALL, lambda: True)
