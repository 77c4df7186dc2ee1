"""Steps in flight through stages: each on streams of its own, in the order in which they were launched."""

from __future__ import annotations

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.dispatch.transfer.stages import StagePipeline, StageStep, StageTimes, running_step

pytestmark = [pytest.mark.virtual_only("several accelerators"), pytest.mark.usefixtures("accelerators")]


def devices() -> list[torch.device]:
    """Return the two accelerators; PyTorch knows their names once they are enabled."""
    return [torch.device("virtual:0"), torch.device("virtual:1")]


@pytest.fixture
def pipeline(accelerators: None) -> StagePipeline:
    virtual.enable(2, strict=True, late_compute=True)
    return StagePipeline(devices(), devices()[0])


def launched(pipeline: StagePipeline, held: list[torch.Tensor], value: float) -> tuple[StageStep, torch.Tensor]:
    """Launch a step that adds a value to what each stage holds, and returns what it found in the last one."""
    with pipeline.step() as step:
        x = torch.full((4,), value, device=devices()[0])
        for stage, kept in enumerate(held):
            step.enter(stage)
            x = x.to(kept.device)
            kept += x
        return step, kept.to("cpu", non_blocking=True)


def test_steps_find_what_earlier_ones_have_left_in_each_stage(pipeline: StagePipeline) -> None:
    held = [torch.zeros(4, device=device) for device in devices()]
    steps = [launched(pipeline, held, value) for value in (1.0, 2.0, 3.0)]
    for (step, found), total in zip(steps, (1.0, 3.0, 6.0), strict=True):
        step.land()
        assert found.tolist() == [total] * 4


def test_a_step_follows_what_was_launched_before_it_outside(pipeline: StagePipeline) -> None:
    held = torch.zeros(4, device=devices()[1]) + 1
    with pipeline.step() as step:
        step.enter(1)
        found = (held + 1).to("cpu", non_blocking=True)
    step.land()
    assert found.tolist() == [2.0] * 4


def test_the_streams_of_a_step_are_current_within_it_alone(pipeline: StagePipeline) -> None:
    before = [virtual.current_stream(index) for index in (0, 1)]
    assert running_step() is None
    with pipeline.step() as step:
        within = [virtual.current_stream(index) for index in (0, 1)]
        assert running_step() is step
        assert not {*before} & {*within}
        with pipeline.step() as other:
            assert not {virtual.current_stream(0)} & {*before, *within}
    assert running_step() is None
    assert [virtual.current_stream(index) for index in (0, 1)] == before
    for each in (step, other):
        each.land()


def test_a_step_takes_over_the_streams_of_one_that_has_landed(pipeline: StagePipeline) -> None:
    seen = set()
    for _ in range(4):
        with pipeline.step() as step:
            step.enter(0)
            seen.add(virtual.current_stream(0))
        step.land()
        step.land()  # of no effect
    assert len(seen) == 1
    assert pipeline.times.steps == 4


def test_an_error_leaves_the_stages_to_others(pipeline: StagePipeline) -> None:
    held = [torch.zeros(4, device=device) for device in devices()]
    with pytest.raises(ValueError, match="in the first"), pipeline.step() as failed:
        failed.enter(0)
        held[0].add_(5)
        raise ValueError("in the first")
    step, found = launched(pipeline, held, 1.0)
    step.land()
    failed.land()
    assert held[0].tolist() == [6.0] * 4
    assert found.tolist() == [1.0] * 4


@pytest.mark.slow
def test_busy_seconds_are_those_of_stages_on_accelerators_of_a_set_speed() -> None:
    virtual.enable(2, flops=1e4)
    pipeline = StagePipeline(devices(), devices()[0])
    x = torch.ones(10, 10)
    steps = []
    for _ in range(3):
        with pipeline.step() as step:
            for stage, device in enumerate(devices()):
                step.enter(stage)
                torch.mm(x.to(device), x.to(device))
        steps.append(step)
    for step in steps:
        step.land()
    assert pipeline.times.busy == pytest.approx({"virtual:0": 0.6, "virtual:1": 0.6}, abs=0.15)
    assert pipeline.times.active >= 0.8


def test_without_streams_the_host_is_timed() -> None:
    virtual.enable(2, strict=False)
    pipeline = StagePipeline(devices(), devices()[0])
    step, _ = launched(pipeline, [torch.zeros(4, device=device) for device in devices()], 1.0)
    step.land()
    assert all(pipeline.times.busy.values())
    assert pipeline.times.active >= max(pipeline.times.busy.values())


def test_the_idle_share_is_of_the_time_in_which_steps_were_in_flight() -> None:
    times = StageTimes(active=10.0, busy={"virtual:0": 7.5, "virtual:1": 10.2})
    shares = {device: each["idle_share"] for device, each in times.figures().items()}
    assert shares == {"virtual:0": 0.25, "virtual:1": 0.0}
    assert StageTimes(busy={"virtual:0": 0.0}).figures()["virtual:0"]["idle_share"] == 0.0
