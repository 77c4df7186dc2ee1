"""Steps in flight: while one step of a model is in one stage, others are in the stages before and behind it.

A stage is a run of parts that are resident on one accelerator. A step has streams of its own, one on each accelerator:
whatever its forward does in and between its parts, copies from device to device included, is ordered among itself as in
any forward, and holds up no other step. On the current streams it would: PyTorch orders a copy between two devices
after all that both have been given to do. Only stages order steps: each enters a stage once the one before has left it.
So steps are computed in the order in which they were launched, and what a part keeps, such as keys and values, is
written and read in that order. The host launches a whole step at once, and waits for nothing until it wants its
results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...devices.streams import (
    DeviceEvent,
    current_stream,
    has_streams,
    new_stream,
    on_streams,
    seconds_between,
    timed_mark,
)

Mark = DeviceEvent | float
"""A point in the work of a device; of one without streams, a time."""


class _Running(threading.local):
    """The step that the calling thread launches."""

    step: StageStep | None = None


_running = _Running()


def running_step() -> StageStep | None:
    """Return the step that the calling thread launches; None outside `StagePipeline.step`."""
    return _running.step


@dataclass
class StageTimes:
    """Seconds in which the devices of stages compute.

    Attributes:
        active: seconds in which any step was in flight.
        busy: by device, seconds in which steps were in its stages.
        steps: number of steps.
    """

    active: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def figures(self) -> dict[str, dict[str, float]]:
        """Return `busy_seconds` and `active_seconds` by device, and the share of these in which it was idle."""
        return {
            device: {
                "busy_seconds": busy,
                "active_seconds": self.active,
                "idle_share": max(0.0, 1.0 - busy / self.active) if self.active else 0.0,
            }
            for device, busy in self.busy.items()
        }


class StagePipeline:
    """The stages of a model, and the steps that are in flight through them.

    Args:
        devices: The accelerator of each stage, in the order in which a step passes through them.
        main: The device of a step's inputs.
        times: Where it is counted how busy the devices are; None: in times of its own.

    Attributes:
        times: How busy the devices are, over all steps that have landed.
    """

    def __init__(self, devices: Sequence[torch.device], main: torch.device, times: StageTimes | None = None) -> None:
        self.devices = tuple(devices)
        self.times = times or StageTimes(busy={str(device): 0.0 for device in self.devices})
        own = dict.fromkeys((*self.devices, main))
        own[main] = own.pop(main)  # the last one is the current device
        self._streamed = [device for device in own if has_streams(device)]
        self._left: list[Mark | None] = [None] * len(self.devices)
        self._free: list[dict[torch.device, Any]] = []
        self._in_flight = 0
        self._since = 0.0

    @contextmanager
    def step(self) -> Iterator[StageStep]:
        """Launch a step within this context: on streams of its own, which follow what was launched outside so far.

        The step is in flight until it has landed (`StageStep.land`).
        """
        own = self._free.pop() if self._free else {device: new_stream(device) for device in self._streamed}
        for device, stream in own.items():
            stream.wait_stream(current_stream(device))
        if not self._in_flight:
            self._since = time.perf_counter()
        self._in_flight += 1
        step = StageStep(self, own)
        with on_streams(own.items()):
            _running.step = step
            try:
                yield step
            finally:
                _running.step = None
                step.leave()

    def follow(self) -> None:
        """Order all that the calling thread launches later outside of steps after those that have landed."""
        for own in self._free:
            for device, stream in own.items():
                current_stream(device).wait_stream(stream)

    def reads(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the calling thread's stream reads what a step has made: its memory is given to no
        other before that is done."""
        if tensor.device in self._streamed:
            tensor.record_stream(current_stream(tensor.device))

    def enter(self, stage: int, begun: DeviceEvent | None) -> Mark:
        """Let the calling thread's stream follow the last step that has left `stage`, and `begun`; return a mark."""
        device = self.devices[stage]
        if device not in self._streamed:
            return time.perf_counter()
        for mark in (self._left[stage], begun):
            if isinstance(mark, DeviceEvent):
                mark.wait_on(current_stream(device))
        return timed_mark(device)

    def leave(self, stage: int) -> Mark:
        """Let steps that are launched later enter `stage` once all that the calling thread has launched is done."""
        device = self.devices[stage]
        mark = self._left[stage] = timed_mark(device) if device in self._streamed else time.perf_counter()
        return mark

    def landed(self, own: dict[torch.device, Any], visits: Sequence[tuple[int, Mark, Mark]]) -> None:
        """Count a step that has landed, and have another one take over its streams."""
        for stage, begin, end in visits:
            if isinstance(begin, DeviceEvent) and isinstance(end, DeviceEvent):
                seconds = seconds_between(begin, end)
            else:
                assert isinstance(begin, float)
                assert isinstance(end, float)
                seconds = end - begin
            self.times.busy[str(self.devices[stage])] += seconds
        self._free.append(own)
        self._in_flight -= 1
        self.times.steps += 1
        if not self._in_flight:
            self.times.active += time.perf_counter() - self._since


class StageStep:
    """One step in flight.

    Args:
        pipeline: The stages.
        own: Its stream on each accelerator that has streams.
    """

    def __init__(self, pipeline: StagePipeline, own: dict[torch.device, Any]) -> None:
        self._pipeline = pipeline
        self._own = own
        self._stage: int | None = None
        self._begun: Mark = 0.0
        self._visits: list[tuple[int, Mark, Mark]] = []
        self._has_landed = False

    def enter(self, stage: int) -> None:
        """Go on in `stage`, if the step is not in it: a part of it is about to be launched."""
        if stage == self._stage:
            return
        before = self.leave()
        self._begun = self._pipeline.enter(stage, before if isinstance(before, DeviceEvent) else None)
        self._stage = stage

    def leave(self) -> Mark | None:
        """Leave the stage that the step is in, if any; return the mark of its end."""
        if self._stage is None:
            return None
        end = self._pipeline.leave(self._stage)
        self._visits.append((self._stage, self._begun, end))
        self._stage = None
        return end

    def land(self) -> None:
        """Block the calling thread until the step is done; the second time, do nothing.

        Raises:
            Exception: An operation of the step failed after it had been launched.
        """
        if self._has_landed:
            return
        self._has_landed = True
        try:
            if self._visits and isinstance(end := self._visits[-1][2], DeviceEvent):
                end.synchronize()
        except BaseException:
            self._visits.clear()  # not all of its marks may have passed
            raise
        finally:
            self._pipeline.landed(self._own, self._visits)
