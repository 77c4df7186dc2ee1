"""What dispatching may be told, and what follows from it."""

from __future__ import annotations

import pytest

from bigmodel.dispatch.placement.options import Options, size_or_none
from bigmodel.dispatch.placement.tensors import Placement
from bigmodel.errors import PlanError

pytestmark = pytest.mark.usefixtures("accelerators")


def test_a_budget_is_found_by_whatever_name_its_device_is_given() -> None:
    options = Options.read(max_memory={0: "1KiB", "cpu": 2**20})
    assert options.budget("virtual:0") == options.budget(0) == 1024
    assert options.budget("cpu") == 2**20
    assert options.budget(1) is None


def test_without_budgets_there_is_no_limit() -> None:
    assert Options.read().budget("cpu") is None
    assert Options.read() == Options()


def test_what_people_give_is_read() -> None:
    options = Options.read(expert_cache="1KiB", pinned_memory=7, offload_dtype="int8", slots=3)
    assert (options.expert_cache, options.pinned_memory, options.offload_dtype, options.slots) == (1024, 7, "int8", 3)
    with pytest.raises(PlanError, match="int3"):
        Options.read(offload_dtype="int3")


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
