from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigmodel.profile.recorder import Recorder, cut
from bigmodel.profile.trace import Allocate, Enter, Free, Leave


def test_births_and_deaths_are_recorded_and_views_and_weights_are_not() -> None:
    with FakeTensorMode():
        weight = torch.empty(8, 8)
        recorder = Recorder(iter([weight]))
        with recorder:
            x = torch.empty(4, 8)
            y = x @ weight.t()
            del x
            z = y.view(8, 4)[2:]
            del y
            del z
    kinds = [(type(event), event.storage) for event in recorder.events if isinstance(event, (Allocate, Free))]
    assert kinds == [(Allocate, 0), (Allocate, 1), (Free, 0), (Free, 1)]
    assert [event.nbytes for event in recorder.events if isinstance(event, Allocate)] == [128, 128]


def test_units_are_recorded_with_what_goes_in_and_comes_out() -> None:
    with FakeTensorMode():
        linear = nn.Linear(8, 2, bias=False)
        recorder = Recorder(linear.parameters())
        recorder.follow(linear, 5)
        with recorder, torch.no_grad():
            linear(torch.empty(4, 8))
    enter = next(event for event in recorder.events if isinstance(event, Enter))
    leave = next(event for event in recorder.events if isinstance(event, Leave))
    assert (enter.unit, enter.inputs) == (5, ((0, 128),))
    assert (leave.unit, leave.outputs) == (5, ((1, 32),))


def test_a_recording_is_cut_into_traces_that_know_what_was_alive() -> None:
    events = [Enter(1), Allocate(0, 8), Leave(1), Allocate(1, 4), Free(1), Enter(2), Free(0), Leave(2)]
    first, second = cut(events, [(0, 3), (5, 8)])
    assert first.initial == ()
    assert [(held.storage, held.nbytes, held.unit) for held in second.initial] == [(0, 8, 1)]
    assert second.events == tuple(events[5:8])
