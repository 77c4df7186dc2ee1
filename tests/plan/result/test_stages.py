"""How many steps in flight are fastest, by the predicted seconds of steps of fewer tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigmodel.plan import Plan
from bigmodel.plan.result.stages import ResidentStages, stage_runs

from .test_plan import PLAN

COMPUTING = ResidentStages((0, 1), ((1, (1.0, 1.0)), (2, (2.0, 2.0)), (1024, (1024.0, 1024.0))), 0.001)
"""Devices that compute: twice the tokens take twice the time."""

READING = ResidentStages((0, 1), ((1, (1.0, 1.0)), (1024, (1.0, 1.0))), 0.001)
"""Devices that read their weights, however many tokens there are."""

UNEVEN = ResidentStages((0, 1, 2), ((1, (1.0, 2.0, 1.0)), (1024, (1024.0, 2048.0, 1024.0))), 0.001)


def slow_turn(found: ResidentStages, tokens: int, steps: int, turns: int = 60) -> float:
    """Seconds of a turn of all steps, by moving each step through the devices."""
    free = dict.fromkeys(found.devices, 0.0)
    most = -(-tokens // steps)
    sizes = [min(most, tokens - first) for first in range(0, tokens, most)]
    done, host, ends = [0.0] * len(sizes), 0.0, []
    for _ in range(turns):
        for step, size in enumerate(sizes):
            host = max(host, done[step]) + found.launch
            at = host
            for device, seconds in zip(found.devices, found.step_seconds(size), strict=True):
                at = free[device] = max(at, free[device]) + seconds
            done[step] = at
        ends.append(max(done))
    return (ends[-1] - ends[turns // 2 - 1]) / (turns - turns // 2)


@pytest.mark.parametrize("found", [COMPUTING, READING, UNEVEN], ids=["computing", "reading", "uneven"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_a_turn_takes_what_moving_each_step_through_the_devices_takes(found: ResidentStages, steps: int) -> None:
    assert found.turn_seconds(24, steps) == pytest.approx(slow_turn(found, 24, steps), rel=0.02)


def test_devices_that_compute_are_filled_and_as_many_steps_wait() -> None:
    assert COMPUTING.most == 4
    assert COMPUTING.steps(24) == 4
    assert COMPUTING.gain(24, 3) == pytest.approx(2.0)
    assert COMPUTING.steps(2) == 2
    assert COMPUTING.steps(1) == 1


def test_steps_that_wait_hide_the_seconds_in_which_the_host_launches() -> None:
    slow = replace(COMPUTING, launch=1.0)
    assert slow.turn_seconds(8, 2) == pytest.approx(9.0)  # each waits for the host, once it has been through both
    assert slow.turn_seconds(8, 4) == pytest.approx(8.0)
    assert slow.steps(8) == 4


def test_whole_sequences_are_divided() -> None:
    # Of five in three steps, two have two: the last one is half as long.
    assert COMPUTING.turn_seconds(5, 3) == pytest.approx(5.0)
    assert COMPUTING.turn_seconds(5, 4) == COMPUTING.turn_seconds(5, 3)


def test_devices_that_read_their_weights_gain_nothing() -> None:
    assert READING.steps(24) == READING.steps(1024) == 1
    assert READING.gain(24, 2) == pytest.approx(1.0, rel=1e-3)  # but for a launch
    assert READING.least_tokens() is None


def test_a_host_that_launches_slowly_gains_nothing() -> None:
    assert replace(COMPUTING, launch=100.0).steps(24) == 1


def test_the_slowest_device_bounds_the_gain() -> None:
    assert UNEVEN.gain(24, UNEVEN.steps(24)) == pytest.approx(2.0)


def test_a_plan_says_what_a_server_does() -> None:
    assert "up to 4 steps in flight on devices 0, 1, from 2 tokens on" in replace(PLAN, stages=COMPUTING).explain()
    assert "one step of a server at a time" in " ".join(str(replace(PLAN, stages=READING)).split())
    assert Plan.from_json(replace(PLAN, stages=UNEVEN).to_json()).stages == UNEVEN


def test_stages_are_runs_of_resident_parts_on_one_device() -> None:
    part = PLAN.parts[0]
    parts = [replace(part, name=name, device=on, runs_on=on) for name, on in zip("abcd", (0, 0, 1, 0), strict=True)]
    assert stage_runs(replace(PLAN, parts=tuple(parts))) == [(0, ("a", "b")), (1, ("c",)), (0, ("d",))]
    assert stage_runs(replace(PLAN, parts=tuple(parts[:2]))) == []
    streamed = replace(parts[2], device="cpu")
    assert stage_runs(replace(PLAN, parts=(*parts[:2], streamed))) == []
    elsewhere = replace(parts[2], kv_on_host=True)
    assert stage_runs(replace(PLAN, parts=(*parts[:2], elsewhere))) == []
