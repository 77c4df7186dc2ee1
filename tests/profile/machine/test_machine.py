from __future__ import annotations

import json

import pytest

from bigmodel.errors import PlanError
from bigmodel.profile.machine import machine as machine_json
from bigmodel.profile.machine.machine import Curve, DeviceSpeed, ExpertOverhead, LinkSpeed, nominal_machine
from bigmodel.profile.model.experts import RouterChoice
from bigmodel.profile.trace.work import ATTENTION, MOVE, PRODUCT, Work

CURVE = Curve((1.0, 4.0, 16.0), (2.0, 8.0, 8.0), grows=True)


def test_a_curve_is_interpolated_linearly_on_logarithmic_scales() -> None:
    assert [CURVE.at(size) for size in (1, 4, 16)] == pytest.approx([2.0, 8.0, 8.0])
    assert CURVE.at(2) == pytest.approx(4.0)


def test_a_curve_is_constant_or_proportional_beyond_its_ends() -> None:
    assert CURVE.at(0.1) == 2.0
    assert CURVE.at(32) == pytest.approx(16.0)
    assert Curve((1.0, 4.0), (2.0, 8.0)).at(64) == 8.0


def test_a_product_takes_the_time_of_its_matrix_and_a_call() -> None:
    speed = DeviceSpeed({"product:float32": CURVE, "product:float32:cached": Curve((1.0,), (1.0,))}, 10.0, 5.0)
    work = [Work("product", elements=3, rows=4), Work("call")]
    assert speed.total(work) == pytest.approx(3 * 8.0 + 2 * 10.0)
    assert speed.total(work, cached=True) == pytest.approx(3 * 1.0 + 2 * 5.0)


def test_calls_overlap_with_work_on_asynchronous_devices() -> None:
    speed = DeviceSpeed({"product:float32": CURVE}, 10.0, 10.0, asynchronous=True)
    assert speed.total([Work("product", elements=1, rows=1)]) == 10.0
    assert speed.total([Work("product", elements=9, rows=4)]) == pytest.approx(72.0)


def test_an_unmeasured_dtype_has_the_speed_of_float32() -> None:
    speed = DeviceSpeed({"product:float32": CURVE}, 0.0, 0.0)
    assert speed.seconds(Work("product", "float64", elements=1)) == 2.0


def test_experts_cost_seconds_by_module_and_by_expert_and_for_those_fetched_ahead() -> None:
    overhead = ExpertOverhead(module=1.0, chosen=0.01, ahead=0.0001)
    few, nearly_all = RouterChoice(1, 2, 8), RouterChoice(64, 2, 8)
    assert nearly_all.wanted > 7
    assert overhead.seconds(few) == pytest.approx(1.02)
    assert overhead.seconds(nearly_all) == pytest.approx(1 + 0.01 * nearly_all.wanted + 8 * 0.0001)


def test_a_copy_takes_a_latency_and_its_bytes() -> None:
    assert LinkSpeed(100.0, 0.5).seconds(50) == 1.0


def test_an_unmeasured_device_has_the_speed_of_one_of_its_type() -> None:
    machine = nominal_machine()
    assert machine.device("cuda:7") is machine.devices["cuda:0"]
    assert machine.link("cuda:7") is machine.links["cuda:0"]
    assert machine.device("mps") is machine.devices["cpu"]


MACHINE = nominal_machine()


def test_a_profile_is_equal_after_json() -> None:
    assert machine_json.load(machine_json.dump(MACHINE)) == MACHINE


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", "null", "[" * 100_000, '{"format": 5, "machine": {"name": 3}}'])
def test_text_that_is_not_a_profile_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a machine profile"):
        machine_json.load(text)


@pytest.mark.parametrize("other", [2, 9])
def test_another_format_is_refused_with_its_number(other: int) -> None:
    content = {**json.loads(machine_json.dump(MACHINE)), "format": other}
    with pytest.raises(PlanError, match=f"format {other}; this version reads {machine_json.FORMAT}"):
        machine_json.load(json.dumps(content))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_over_which_nothing_arrives_is_refused(rate: float) -> None:
    with pytest.raises(PlanError, match="give more than 0"):
        LinkSpeed(rate)


def test_a_curve_without_points_is_refused() -> None:
    content = json.loads(machine_json.dump(MACHINE))
    content["machine"]["devices"]["cpu"]["curves"]["move"] = {"sizes": "many", "values": [1.0]}
    with pytest.raises(PlanError, match="not a machine profile"):
        machine_json.load(json.dumps(content))


HOST, ACCELERATOR = MACHINE.device("cpu"), MACHINE.device("cuda:0")


def test_every_kind_of_work_has_its_seconds_on_both_devices() -> None:
    for work in (Work(PRODUCT, "float32", 1000, 8), Work(ATTENTION, "bfloat16", 1000, 8), Work(MOVE, nbytes=4000)):
        assert 0 < ACCELERATOR.seconds(work) < HOST.seconds(work)


def test_few_rows_take_the_time_of_reading_and_many_that_of_multiplying() -> None:
    for device in (HOST, ACCELERATOR):
        one, two, many, more = (device.seconds(Work(PRODUCT, "float32", 10**6, rows)) for rows in (1, 2, 256, 512))
        assert two < 2 * one < 2 * many
        assert more == 2 * many


def test_streaming_is_slower_than_memory_and_faster_than_the_disk() -> None:
    link = MACHINE.link("cuda:0")
    assert MACHINE.disk_cold < link.to_device.rate < MACHINE.memory_rate
    assert link.to_device_pageable.rate < link.to_device.rate


def test_any_cuda_device_has_the_speed_of_the_nominal_one() -> None:
    assert MACHINE.device("cuda:5") is ACCELERATOR
    assert MACHINE.link("cuda:5") is MACHINE.link("cuda:0")


def test_the_nominal_machine_can_be_saved_as_json() -> None:
    assert machine_json.load(machine_json.dump(MACHINE)) == MACHINE
