from __future__ import annotations

import pytest
import torch

from bigmodel.devices import accelerators as present
from bigmodel.devices import virtual
from bigmodel.errors import DeviceError, SizeError
from bigmodel.plan import make_plan
from bigmodel.plan.result.budgets import device_type_of, is_accelerator, read_budgets, with_headroom

from ...profile.models import tiny_llama


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


def test_nonsense_is_refused() -> None:
    virtual.disable()
    for budgets, error in (({0: 1, "0": 2}, SizeError), ({-1: 3}, DeviceError), ({0: "much"}, SizeError)):
        with pytest.raises(error):
            read_budgets(budgets)  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        read_budgets({"gpu": 3})


def test_what_computes_beside_the_host() -> None:
    assert [is_accelerator(key) for key in (0, "mps", "cuda:3", "cpu", "disk", "meta")] == [True] * 3 + [False] * 3


def test_headroom_is_left_on_everything_but_the_disk() -> None:
    assert with_headroom({0: 1000, "cpu": 10, "disk": 7}) == {0: 900, "cpu": 9, "disk": 7}
