from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigmodel.profile.trace.events import OUTSIDE, Allocate, Call, Enter, Free, Leave, OutsideUse, Return
from bigmodel.profile.trace.fake_kernels import run_fake
from bigmodel.profile.trace.recorder import Recorder
from bigmodel.profile.trace.work import scratch_bytes

aten = torch.ops.aten


def test_allocations_and_frees_are_recorded_and_views_and_weights_are_not() -> None:
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


def test_units_are_recorded_with_inputs_and_outputs() -> None:
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


def test_inputs_in_containers_of_any_class_are_recorded() -> None:
    class Reading(nn.Module):
        def forward(self, states: UserDict[str, torch.Tensor]) -> torch.Tensor:
            return states["key"] + 1

    with FakeTensorMode():
        recorder = Recorder(iter([]))
        recorder.follow(module := Reading(), 0)
        with recorder:
            module(UserDict(key=torch.empty(4)))
    assert next(event for event in recorder.events if isinstance(event, Enter)).inputs == ((0, 16),)


def test_weights_of_units_that_other_operations_read_are_recorded() -> None:
    with FakeTensorMode():
        first, second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        recorder = Recorder(iter([*first.parameters(), *second.parameters()]))
        for unit, module in enumerate((first, second)):
            recorder.follow(module, unit)
        with recorder, torch.no_grad():
            x = first(torch.empty(4, 8))
            x @ second.weight.t() + first.bias
            first.bias * 2  # runs where the weight lies
    uses = [event for event in recorder.events if isinstance(event, OutsideUse)]
    assert [event.weights for event in uses] == [((1, 256),), ((0, 32),)]
    assert recorder.lent == {0, 1}


def test_sources_of_operations_between_units_are_recorded_except_at_inputs() -> None:
    with FakeTensorMode():
        recorder = Recorder(iter([]))
        with recorder:
            x, y = torch.empty(4), torch.empty(4)
            x + y
            with recorder.at_inputs():
                x + y
    made = [event for event in recorder.events if isinstance(event, Allocate)]
    assert [(event.source, event.others) for event in made[2:]] == [(0, ((1, 16),)), (OUTSIDE, ())]


def test_a_call_is_recorded_with_inputs_and_outputs() -> None:
    with FakeTensorMode():
        recorder = Recorder(iter([]))
        with recorder:
            x = torch.empty(4)
            output = recorder.call(lambda: {"same": x, "other": x + 1}, {"x": x}, fresh=[x])
    assert output["same"] is x
    assert [event for event in recorder.events if isinstance(event, Call)] == [Call(((0, 16),))]
    assert [event for event in recorder.events if isinstance(event, Return)] == [
        Return(((0, 16), (1, 16)), frozenset({0}))
    ]


def test_grouped_products_have_a_fake_for_every_dtype() -> None:
    tokens, experts = torch.empty(6, 4, device="meta"), torch.empty(3, 4, 5, device="meta")
    assert run_fake(aten._grouped_mm.default, (tokens, experts), {}).shape == (6, 5)


def test_batch_norm_in_inference_allocates_statistics_only_on_cuda() -> None:
    x, each = torch.empty(2, 3, 4, 4, device="meta"), torch.empty(3, device="meta")
    outputs = run_fake(aten.native_batch_norm.default, (x, each, each, each, each, False, 0.1, 1e-5), {})
    assert [tuple(output.shape) for output in outputs] == [(2, 3, 4, 4), (0,), (0,)]


class CallsForward(nn.Module):
    """Calls the forward of a part itself, as SqueezeBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part.forward(x)


def test_a_module_whose_forward_is_called_without_its_hooks_is_followed() -> None:
    model = CallsForward()
    recorder = Recorder(model.parameters())
    recorder.follow(model.part, 5)
    with recorder, torch.no_grad():
        model(torch.ones(2, 4))
    assert [event.unit for event in recorder.events if isinstance(event, (Enter, Leave))] == [5, 5]
    recorder.unfollow()
    assert "forward" not in model.part.__dict__


FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize(
    ("rows", "keys", "dtype", "each_thread"),
    [
        (1, 40, torch.float32, 4 * 1 * (40 + 2 + 64)),
        (128, 128, torch.float32, 4 * 32 * (128 + 2 + 64)),
        (1024, 1024, torch.float32, 4 * 256 * (512 + 2 + 64)),
        (1024, 1024, torch.bfloat16, 4 * 256 * (512 + 2 + 64) + 2 * 256 * 512),
    ],
)
def test_flash_attention_on_the_host_holds_a_block_of_scores_for_each_thread(
    rows: int, keys: int, dtype: torch.dtype, each_thread: int
) -> None:
    query, key = (torch.empty(1, 4, length, 64, dtype=dtype, device="meta") for length in (rows, keys))
    assert scratch_bytes(FLASH, (query, key, key), query) == torch.get_num_threads() * each_thread


def test_other_kernels_have_no_workspace() -> None:
    x = torch.ones(4, 4)
    assert scratch_bytes(aten.mm.default, (x, x), x @ x) == 0


def convolution(channels: int, side: int, to: int, span: int, stride: int = 1, dtype: Any = torch.float32) -> int:
    """Return the workspace of a convolution on the host; its data are a megabyte at most."""
    data, weight = torch.zeros(1, channels, side, side, dtype=dtype), torch.zeros(to, channels, span, span, dtype=dtype)
    given = data, weight, None, [stride] * 2, [span // 2] * 2, [1] * 2, False, [0] * 2, 1
    return scratch_bytes(aten.convolution.default, given, aten.convolution.default(*given))


def test_a_convolution_on_the_host_copies_its_input_and_weights() -> None:
    assert convolution(64, 14, 64, 3) == 4 * (64 * 14 * 14 + 64 * 64 * 9)
    assert convolution(64, 14, 64, 3, dtype=torch.bfloat16) == 2 * (64 * 14 * 14 + 64 * 64 * 9)
    assert convolution(64, 14, 128, 1, stride=2) == 4 * (64 * 14 * 14 + 64 * 128)


def test_a_convolution_of_few_channels_reorders_only_its_output() -> None:
    assert convolution(3, 56, 64, 7, stride=2) == 4 * 64 * 28 * 28


def test_a_pointwise_convolution_copies_nothing() -> None:
    assert convolution(64, 14, 64, 1) == 0


def test_softmax_of_rows_that_may_be_masked_whole_holds_a_byte_for_each_score() -> None:
    scores = torch.zeros(1, 4, 10, 10)
    assert scratch_bytes(aten._safe_softmax.default, (scores, -1), scores) == 400


class Coding(nn.Module):
    """Computes with its weights in a method, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)

    def encode(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x) * scale

    def fixed(self, scale: float) -> torch.Tensor:
        return self.linear.weight * scale


def test_a_method_that_others_call_is_recorded_with_what_it_reads_and_where_its_outputs_go() -> None:
    with FakeTensorMode():
        module = Coding()
        recorder = Recorder(iter(module.parameters()))
        recorder.follow(module, 3)
        with recorder, torch.no_grad():
            x = torch.zeros(2, 4)
            recorder.events.clear()
            made = module.encode(x, scale=2.0)
            events, outside = list(recorder.events), list(recorder.lent)
            recorder.events.clear()
            module(x)
            by_forward = list(recorder.events)
            recorder.events.clear()
            module.fixed(2.0)
            without_tensors = list(recorder.events)
            number, result = recorder.number_of(x), recorder.number_of(made)
        recorder.unfollow()
    assert events[0] == Enter(3, ((number, x.nbytes),))
    assert events[-1] == Leave(3, ((result, made.nbytes),), source=number)
    assert [sum(n for _, n in each.weights) for each in events if isinstance(each, OutsideUse)] == [80]
    assert not outside
    assert [type(each) for each in by_forward if isinstance(each, (Enter, Leave, OutsideUse))] == [Enter, Leave]
    assert [each.source for each in by_forward if isinstance(each, Leave)] == [None]
    assert not any(isinstance(each, Enter) for each in without_tensors)
    assert not {"encode", "forward", "fixed"} & module.__dict__.keys()
