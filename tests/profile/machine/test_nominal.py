from __future__ import annotations

from bigmodel.profile.machine import machine as machine_json
from bigmodel.profile.machine.nominal import nominal_machine
from bigmodel.profile.trace.work import ATTENTION, MOVE, PRODUCT, Work

MACHINE = nominal_machine()
HOST, ACCELERATOR = MACHINE.device("cpu"), MACHINE.device("cuda:0")


def test_every_kind_of_work_has_its_seconds_on_both_devices() -> None:
    for work in (Work(PRODUCT, "float32", 1000, 8), Work(ATTENTION, "bfloat16", 1000, 8), Work(MOVE, nbytes=4000)):
        assert 0 < ACCELERATOR.seconds(work) < HOST.seconds(work)


def test_few_rows_take_what_reading_the_matrix_takes_and_many_what_multiplying_takes() -> None:
    for device in (HOST, ACCELERATOR):
        one, two, many, more = (device.seconds(Work(PRODUCT, "float32", 10**6, rows)) for rows in (1, 2, 256, 512))
        assert two < 2 * one < 2 * many
        assert more == 2 * many


def test_streaming_is_slower_than_memory_and_faster_than_the_disk() -> None:
    link = MACHINE.link("cuda:0")
    assert MACHINE.disk_cold < link.to_device.rate < MACHINE.memory_rate
    assert link.to_device_pageable.rate < link.to_device.rate


def test_any_cuda_device_is_like_the_one_it_has() -> None:
    assert MACHINE.device("cuda:5") is ACCELERATOR
    assert MACHINE.link("cuda:5") is MACHINE.link("cuda:0")


def test_it_is_a_profile_as_measured_ones_are() -> None:
    assert machine_json.load(machine_json.dump(MACHINE)) == MACHINE
