"""Parameters keep their class and attributes when their values move, also in recurrent layers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.dispatch import cpu_offload_with_hook, dispatch_model, undispatch
from bigmodel.dispatch.weights.parameters import like, moved_like, refresh_second_places, second_places, take_over

from ...accelerators import at, two


class Marked(nn.Parameter):
    """A kind of parameter of somebody else's."""


def test_a_parameter_stays_a_parameter_of_its_kind_with_its_attributes() -> None:
    original = Marked(torch.ones(2))
    original.note = "kept"  # type: ignore[attr-defined]
    found = like(original, torch.zeros(2))
    assert type(found) is Marked
    assert found.note == "kept"  # type: ignore[attr-defined]
    assert found.requires_grad
    assert torch.equal(found, torch.zeros(2))


def test_a_plain_tensor_stays_one() -> None:
    value = torch.zeros(2)
    assert like(torch.ones(2), value) is value


def test_gradients_are_wanted_as_before_unless_said_or_impossible() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    assert not like(frozen, torch.zeros(2)).requires_grad
    assert not like(nn.Parameter(torch.ones(2)), torch.zeros(2), requires_grad=False).requires_grad
    assert not like(nn.Parameter(torch.ones(2)), torch.zeros(2, dtype=torch.int8)).requires_grad


def test_moving_may_cast() -> None:
    moved = moved_like(nn.Parameter(torch.ones(2)), torch.device("cpu"), torch.bfloat16)
    assert isinstance(moved, nn.Parameter)
    assert moved.dtype == torch.bfloat16


pytestmark = pytest.mark.usefixtures("every_accelerator")


class Looking(nn.GRU):
    """Notes where the weights lie that it would compute with, which the virtual accelerator cannot."""

    seen: list[tuple[bool, str]]

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        self.seen = [(used is self._parameters[name], str(used.device)) for name, used in self.used().items()]
        return x

    def used(self) -> dict[str, Any]:
        return dict(zip(self._flat_weights_names, self._flat_weights, strict=True))


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Looking(8, 8, num_layers=2, bidirectional=True))


@two
@pytest.mark.parametrize("device_map", [{"": 0}, {"": "cpu"}, {"0": 0, "1": 1}, {"0": 0, "1": "cpu"}])
def test_a_dispatched_layer_computes_with_the_parameters_it_shows_and_so_it_does_afterwards(
    device_map: dict[str, Any],
) -> None:
    model = dispatch_model(model_of(), device_map, main_device=0)
    layer = model[1]
    model(torch.ones(3, 2, 8).to(at(0)))
    assert layer.seen == [(True, at(1 if device_map.get("1") == 1 else 0))] * 16
    undispatch(model)
    assert [used is layer._parameters[name] for name, used in layer.used().items()] == [True] * 16
    plain = nn.GRU(8, 8, num_layers=2, bidirectional=True)
    plain.load_state_dict(layer.state_dict())
    x = torch.ones(3, 2, 8)
    assert torch.equal(nn.GRU.forward(layer.cpu(), x)[0], plain(x)[0])


def test_streamed_weights_are_the_hosts_again_after_a_forward() -> None:
    model = dispatch_model(model_of(), {"": "cpu"}, main_device=0)
    model(torch.ones(3, 2, 8))
    assert [str(used.device) for used in model[1].used().values()] == ["cpu"] * 16


def test_a_layer_that_is_moved_whole_takes_its_second_list_along() -> None:
    model, hook = cpu_offload_with_hook(model_of(), 0)
    model(torch.ones(3, 2, 8))
    assert model[1].seen == [(True, at(0))] * 16
    hook.offload()
    assert [str(used.device) for used in model[1].used().values()] == ["cpu"] * 16


def test_only_recurrent_layers_have_second_places() -> None:
    layer = nn.LSTM(4, 4)
    (place,) = second_places(layer, "weight_hh_l0")
    assert place.weights[place.place] is layer.weight_hh_l0
    layer._init_flat_weights()
    place.show(layer.bias_ih_l0)
    assert layer._flat_weights[place.place] is layer.bias_ih_l0
    assert second_places(nn.Linear(2, 2), "weight") == []


@pytest.mark.usefixtures("every_accelerator")
def test_streamed_recurrent_layers_compute_with_their_slot_in_every_forward() -> None:
    model = nn.Sequential(nn.LSTM(8, 64)).eval()
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    peaks = []
    for _ in range(3):
        reset_peak_memory(0)
        with torch.no_grad():
            model(torch.ones(2, 1, 8))
        peaks.append(max_memory_allocated(0))
    assert max(peaks) == peaks[0]


def test_refreshing_takes_over_what_was_put_under_the_names() -> None:
    layer = nn.LSTM(4, 4)
    new = layer._parameters["weight_ih_l0"] = nn.Parameter(torch.zeros(16, 4))
    refresh_second_places(nn.Sequential(layer))
    assert layer._flat_weights[0] is new


def test_a_parameter_with_weak_references_takes_over_elements_and_gives_up_its_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    seen = weakref.ref(parameter)
    value = nn.Parameter(torch.ones(3))
    assert take_over(parameter, value)
    assert seen() is parameter
    assert parameter.tolist() == [1.0] * 3
    assert parameter.grad is None
    assert value.grad is not None
    assert value.tolist() == [0.0] * 2
