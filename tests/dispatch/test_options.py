"""What dispatching may be told, and what follows from it."""

from __future__ import annotations

import pytest

from bigmodel.dispatch.options import Options, read_budgets, size_or_none
from bigmodel.dispatch.placement import Placement

pytestmark = pytest.mark.usefixtures("accelerators")


def test_a_budget_is_found_by_whatever_name_its_device_is_given() -> None:
    options = Options(budgets=read_budgets({0: "1KiB", "cpu": 2**20}))
    assert options.budget("virtual:0") == options.budget(0) == 1024
    assert options.budget("cpu") == 2**20
    assert options.budget(1) is None


def test_without_budgets_there_is_no_limit() -> None:
    assert read_budgets(None) is None
    assert Options().budget("cpu") is None


@pytest.mark.parametrize(("given", "nbytes"), [(None, None), (7, 7), ("2KiB", 2048)])
def test_sizes_are_bytes_or_text(given: int | str | None, nbytes: int | None) -> None:
    assert size_or_none(given) == nbytes


@pytest.mark.parametrize(
    ("device_map", "budget", "ahead"),
    [
        ({"": "disk"}, {"cpu": 100}, True),
        ({"": "disk"}, None, False),
        ({"": "cpu"}, {"cpu": 100}, False),
        ({"": "disk", "head": 0}, {"cpu": 100}, False),
    ],
)
def test_weights_are_read_later_where_the_host_computes_with_a_disk_under_a_budget(
    device_map: dict[str, int | str], budget: dict[int | str, int] | None, ahead: bool
) -> None:
    assert Options(budgets=budget).reads_ahead(Placement(device_map)) is ahead
