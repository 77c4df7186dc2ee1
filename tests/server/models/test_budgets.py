"""The budgets of a server are those that the planner takes for one model."""

from __future__ import annotations

import pytest

from bigmodel.devices import free_memory_bytes, virtual
from bigmodel.errors import SizeError
from bigmodel.server.models.budgets import server_budgets, shown_device


def test_given_budgets_are_parsed(accelerators: None) -> None:
    assert server_budgets({0: "10MB", "cpu": "1GiB", "disk": "1TB"}) == {0: 10**7, "cpu": 1 << 30, "disk": 10**12}
    with pytest.raises(SizeError, match="cpu"):
        server_budgets({"cpu": "much"})


def test_without_any_they_are_a_share_of_what_is_free(accelerators: None) -> None:
    virtual.enable(1, 100 << 20)
    budgets = server_budgets()
    assert budgets[0] == int(0.9 * (100 << 20))
    assert 0 < budgets["cpu"] < free_memory_bytes("cpu")


def test_devices_are_shown_also_those_that_are_not_here(accelerators: None) -> None:
    assert [shown_device(key) for key in (0, "cpu", "disk")] == ["virtual:0", "cpu", "disk"]
    virtual.disable()
    assert shown_device(0) == "cuda:0"
