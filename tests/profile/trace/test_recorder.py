"""."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigmodel.profile.trace.recorder import Recorder, run_fake
from bigmodel.profile.trace.trace import OUTSIDE, Allocate, Call, Enter, Free, Leave, Return


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


def test_between_units_what_an_operation_read_is_recorded_unless_it_is_made_beside_the_inputs() -> None:
    with FakeTensorMode():
        recorder = Recorder(iter([]))
        with recorder:
            x, y = torch.empty(4), torch.empty(4)
            x + y
            with recorder.at_inputs():
                x + y
    made = [event for event in recorder.events if isinstance(event, Allocate)]
    assert [(event.source, event.others) for event in made[2:]] == [(0, ((1, 16),)), (OUTSIDE, ())]


def test_a_call_is_recorded_with_what_the_model_returns_and_what_it_was_given() -> None:
    with FakeTensorMode():
        recorder = Recorder(iter([]))
        with recorder:
            x = torch.empty(4)
            output = recorder.call(lambda: {"same": x, "other": x + 1}, {"x": x}, fresh=[x])
    assert output["same"] is x
    assert [event for event in recorder.events if isinstance(event, Call)] == [Call(((0, 16),), 0)]
    assert [event for event in recorder.events if isinstance(event, Return)] == [
        Return(((0, 16), (1, 16)), frozenset({0}))
    ]


aten = torch.ops.aten


def test_grouped_products_have_a_fake_for_every_dtype() -> None:
    tokens, experts = torch.empty(6, 4, device="meta"), torch.empty(3, 4, 5, device="meta")
    assert run_fake(aten._grouped_mm.default, (tokens, experts), {}).shape == (6, 5)


def test_batch_norm_in_inference_makes_no_statistics_except_on_cuda() -> None:
    x, each = torch.empty(2, 3, 4, 4, device="meta"), torch.empty(3, device="meta")
    outputs = run_fake(aten.native_batch_norm.default, (x, each, each, each, each, False, 0.1, 1e-5), {})
    assert [tuple(output.shape) for output in outputs] == [(2, 3, 4, 4), (0,), (0,)]
