"""Plans with keys and values on the host: of as few layers as must, and where that is predicted to be worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bigmodel.errors import BudgetError
from bigmodel.plan.result.budgets import Key
from bigmodel.plan.search import host_kv
from bigmodel.plan.search.host_kv import is_worthwhile, plan_with_kv_on_disk, plan_with_kv_on_host
from bigmodel.profile import Profile

LAYERS = 8

MODEL: Any = SimpleNamespace(
    growing=range(1, LAYERS + 1),
    kv_cache=[0, *[10] * LAYERS],
    kv_on_host=(),
    workload=SimpleNamespace(context_length=64),
)


@pytest.fixture(autouse=True)
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are stood in for by what is moved of them."""

    def with_kv_on_host(profile: Any, units: Sequence[int], in_ram: int = 0) -> Any:
        held = tuple(10 if index in units else 0 for index in range(LAYERS + 1))
        return SimpleNamespace(**{**vars(profile), "kv_on_host": held, "kv_in_ram": in_ram})

    monkeypatch.setattr(host_kv, "with_kv_on_host", with_kv_on_host)
    monkeypatch.setattr(host_kv, "least_in_ram", lambda profile: 4)


def runs_within(profile: Any, budgets: Mapping[Key, int]) -> bool:
    """Whether budgets hold the keys and values of a profile."""
    there, here = sum(profile.kv_on_host), sum(profile.kv_cache) - sum(profile.kv_on_host)
    in_ram = there * getattr(profile, "kv_in_ram", 0) // 64 or there
    return here <= budgets[0] and in_ram <= budgets["cpu"] and there - in_ram <= budgets.get("disk", 2**30)


def runs(budgets: Mapping[Key, int], profile: Profile, units: Sequence[int]) -> bool:
    assert [*units] == [*range(1, LAYERS + 1)]
    return runs_within(profile, budgets)


def moved_layers(plan: Any) -> int | None:
    return None if plan is None else sum(1 for nbytes in plan.kv_on_host if nbytes)


@pytest.mark.parametrize(("accelerator", "layers"), [(80, None), (79, 1), (30, 5), (0, 8)])
def test_as_few_layers_as_must_have_theirs_on_the_host(accelerator: int, layers: int | None) -> None:
    found = plan_with_kv_on_host(MODEL, {0: accelerator, "cpu": 100}, runs, lambda profile: profile)  # type: ignore[arg-type, return-value]
    assert moved_layers(found) == layers


def test_none_is_made_where_ram_holds_too_few() -> None:
    found = plan_with_kv_on_host(MODEL, {0: 30, "cpu": 40}, runs, lambda profile: profile)  # type: ignore[arg-type, return-value]
    assert found is None


def test_older_ones_are_on_disk_where_ram_holds_too_few() -> None:
    found: Any = plan_with_kv_on_disk(MODEL, {0: 30, "cpu": 40}, runs, lambda profile: profile)  # type: ignore[arg-type, return-value]
    assert moved_layers(found) == 5
    assert found.kv_in_ram * 50 // 64 <= 40 < (found.kv_in_ram + 1) * 50 // 64 + 1


def test_a_disk_that_holds_too_few_gives_no_plan() -> None:
    def refused(profile: Profile) -> Any:
        raise BudgetError("the disk is too small")

    assert plan_with_kv_on_disk(MODEL, {0: 30, "cpu": 40, "disk": 1}, runs, refused) is None


def test_models_without_growing_caches_have_none_moved() -> None:
    plain: Any = SimpleNamespace(**{**vars(MODEL), "growing": ()})
    for make in (plan_with_kv_on_host, plan_with_kv_on_disk):
        assert make(plain, {0: 0, "cpu": 100}, runs, lambda profile: profile) is None  # type: ignore[arg-type, return-value]


def predicted(token: float | None, rate: float | None = None) -> Any:
    prediction = None if token is None else SimpleNamespace(token=token)
    return SimpleNamespace(prediction=prediction, tokens_per_second=rate)


def test_a_plan_is_replaced_by_one_that_is_clearly_faster() -> None:
    assert is_worthwhile(predicted(0.8), predicted(1.0), None)
    assert not is_worthwhile(predicted(0.95), predicted(1.0), "latency")
    assert is_worthwhile(predicted(1.0, 20.0), predicted(1.0, 10.0), "throughput")
    assert not is_worthwhile(predicted(0.1, 10.5), predicted(1.0, 10.0), "throughput")


def test_what_is_not_predicted_is_taken_to_be_faster() -> None:
    assert is_worthwhile(predicted(None), predicted(1.0), None)
    assert is_worthwhile(predicted(1.0), predicted(None), None)
