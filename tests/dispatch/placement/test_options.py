"""What dispatching may be told beside a device map: what a plan decides must agree with the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bigmodel.devices import get_max_memory
from bigmodel.dispatch.placement.options import PlanArguments, dtype_of, offload_of
from bigmodel.errors import PlanError, SizeError
from bigmodel.plan import DevicePlan, Part, Plan
from bigmodel.plan.result.expert_split import ExpertSplit

pytestmark = pytest.mark.usefixtures("accelerators")

PARTS = (Part("table", "cpu", "cpu", 8, "", kind="Embedding"), Part("one", 0, 0, 8, ""), Part("two", "cpu", 0, 8, ""))

PLAN = Plan(
    "Two",
    "latency",
    0,
    {0: DevicePlan(0, budget=2**20), "cpu": DevicePlan("cpu", budget=2**30)},
    PARTS,
    slots=1,
    offload_dtype="int8",
    expert_cache={0: 4096},
    pinned_memory=100,
    dtype="bfloat16",
)


def test_options_are_read_from_all_accepted_forms() -> None:
    read = PlanArguments.read(
        expert_cache="1KiB", pinned_memory=7, offload_dtype="int8", max_memory={"virtual:0": "1KiB"}
    )
    assert (read.expert_cache, read.pinned_memory, read.offload_dtype, read.max_memory) == (1024, 7, "int8", {0: 1024})


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"offload_dtype": "int3"}, PlanError),
        ({"offload": "sometimes"}, PlanError),
        ({"offload_buffers": 2}, PlanError),
        ({"expert_cache": "much"}, SizeError),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        PlanArguments.read(**given)


AGREE = [
    {},
    {"main_device": "virtual:0", "max_memory": {0: 2**20}, "offload": "stream", "offload_buffers": False},
    {"offload_dtype": "int8", "expert_cache": "4KiB", "pinned_memory": 100, "dtype": torch.bfloat16},
    {"offload": "auto"},
]

CONTRADICT = [
    ({"main_device": 1}, "main_device is 1, but the plan has 0"),
    ({"max_memory": {0: "2MiB"}}, r"max_memory\[0\] is 2.00 MiB, but the plan has 1.00 MiB"),
    ({"offload": "compute"}, "offload is 'compute', but the plan has .*'stream'"),
    ({"offload_buffers": True}, "offload_buffers is True, but the plan has False"),
    ({"offload_dtype": "int4"}, "offload_dtype is 'int4', but the plan has 'int8'"),
    ({"expert_cache": 1}, "expert_cache is 1 B .*, but the plan has 4.00 KiB"),
    ({"pinned_memory": 99}, "pinned_memory is 99 B .*, but the plan has 100 B"),
    ({"dtype": torch.float16}, "dtype is torch.float16, but the plan has torch.bfloat16"),
]


@pytest.mark.parametrize("given", AGREE)
def test_an_argument_that_agrees_with_the_plan_is_fine(given: dict[str, Any]) -> None:
    PlanArguments.read(**given).check(PLAN)


@pytest.mark.parametrize(("given", "said"), CONTRADICT)
def test_an_argument_that_contradicts_the_plan_is_refused_with_both_values(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PlanArguments.read(**given).check(PLAN)


def test_another_map_is_planned_as_the_first_one_was() -> None:
    again = PlanArguments.of(PLAN)
    again.check(PLAN)
    assert (again.offload_dtype, again.expert_cache, again.slots) == ("int8", 4096, 1)
    assert again.max_memory == get_max_memory({0: 2**20, "cpu": 2**30})


@pytest.mark.parametrize(
    ("parts", "way"),
    [
        (PARTS, "stream"),
        (PARTS[:2], None),
        ((*PARTS[:2], Part("two", "cpu", "cpu", 8, "")), "compute"),
        ((*PARTS, Part("three", "cpu", "cpu", 8, "")), "auto"),
        ((*PARTS[:2], Part("two", "cpu", 0, 8, "", computed_below=4)), "auto"),
    ],
)
def test_the_way_in_which_a_plan_offloads_is_that_of_its_parts(parts: tuple[Part, ...], way: str | None) -> None:
    assert offload_of(replace(PLAN, parts=parts)) == way


def test_a_plan_that_has_the_host_compute_experts_offloads_both_ways() -> None:
    assert offload_of(replace(PLAN, expert_split=ExpertSplit(1.0, 1.0, 0.0, below=2))) == "auto"


def test_the_dtype_of_a_plan_is_one_of_torch() -> None:
    assert dtype_of(PLAN) is torch.bfloat16
    assert dtype_of(replace(PLAN, dtype=None)) is None
