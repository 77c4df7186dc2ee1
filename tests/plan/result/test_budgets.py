"""."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import pytest
import torch

from bigmodel.devices import accelerators as present
from bigmodel.devices import virtual
from bigmodel.errors import BudgetError, DeviceError, SizeError
from bigmodel.plan import make_plan
from bigmodel.plan.result.budgets import (
    Key,
    budget_error,
    device_name,
    device_type_of,
    is_accelerator,
    read_budgets,
    smallest_budget,
    with_headroom,
)

from ...profile.models import tiny_llama


@pytest.mark.slow
def test_numbers_may_mean_accelerators_of_another_machine() -> None:
    if present():
        pytest.skip("this machine has an accelerator")
    assert list(read_budgets({"disk": "5G", "1": "1K", 0: 7, "cpu": "1KiB"}).items()) == [
        (0, 7), (1, 1000), ("cpu", 1024), ("disk", 5 * 10**9),
    ]  # fmt: skip
    plan = make_plan(tiny_llama(), {0: "500kB", "cpu": "1GB"}, context_length=16)
    assert plan.main_device in (0, "cpu")
    assert device_type_of({0: 7}) == "cpu"


def test_numbers_are_this_machines_accelerators_where_it_has_some(accelerators: None) -> None:
    assert read_budgets({torch.device("virtual:1"): 5, 0: 7}) == {0: 7, 1: 5}
    assert device_type_of({0: 0, 1: 5}) == "virtual"
    assert device_type_of({0: 0, "cpu": 5}) == "cpu"


def test_invalid_budgets_are_refused() -> None:
    virtual.disable()
    for budgets, error in (({0: 1, "0": 2}, SizeError), ({-1: 3}, DeviceError), ({0: "much"}, SizeError)):
        with pytest.raises(error):
            read_budgets(budgets)  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        read_budgets({"gpu": 3})


def test_every_device_but_host_disk_and_meta_is_an_accelerator() -> None:
    assert [is_accelerator(key) for key in (0, "mps", "cuda:3", "cpu", "disk", "meta")] == [True] * 3 + [False] * 3


def test_headroom_is_reserved_on_every_device_but_the_disk() -> None:
    assert with_headroom({0: 1000, "cpu": 10, "disk": 7}) == {0: 900, "cpu": 9, "disk": 7}


def fits(budgets: object) -> bool:
    return budgets[0] + budgets["cpu"] >= 100 and budgets[0] >= 10  # type: ignore[index]


def test_the_smallest_budget_of_one_device() -> None:
    assert smallest_budget({0: 20, "cpu": 30}, 0, 1000, fits) == 70
    assert smallest_budget({0: 20, "cpu": 30}, "cpu", 1000, fits) == 80
    assert smallest_budget({0: 5, "cpu": 30}, "cpu", 1000, fits) is None


def test_the_error_names_every_single_sufficient_budget() -> None:
    error = budget_error({0: 5, "cpu": 30}, 1000, fits)
    assert isinstance(error, BudgetError)
    assert "0: 70 B (70 bytes, 65 B more)" in str(error)
    assert "'cpu': " not in str(error).split("would do")[1]


def test_the_error_says_if_no_single_budget_is_sufficient() -> None:
    with pytest.raises(BudgetError, match="raise several"):
        raise budget_error({0: 5, "cpu": 30}, 1000, lambda budgets: False)


def test_what_would_do_is_searched_for_once_and_only_if_the_message_is_read() -> None:
    asked = []

    def counted(budgets: Mapping[Key, int]) -> bool:
        asked.append(budgets)
        return fits(budgets)

    error = budget_error({0: 5, "cpu": 30}, 1000, counted)
    assert not asked
    again = pickle.loads(pickle.dumps(error))
    searched = len(asked)
    assert searched
    assert str(error) == str(again)
    assert repr(error) == repr(again)
    assert str(error) in repr(error)
    assert len(asked) == searched


@pytest.mark.usefixtures("accelerators")
def test_disk_has_the_device_name_of_the_host() -> None:
    assert [device_name(key) for key in (1, "cpu", "disk")] == ["virtual:1", "cpu", "cpu"]
