"""What stands in for a module's forward: inputs brought, outputs sent back, and the module's own forward kept."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from bigmodel.dispatch.attach.attached_forward import AttachedForward, RefuseConversion
from bigmodel.errors import DispatchError

pytestmark = pytest.mark.usefixtures("accelerators")

DEVICE = torch.device("virtual:0")


class Scale(nn.Module):
    """Says where it was called, and multiplies."""

    def forward(self, x: torch.Tensor, *, by: torch.Tensor | None = None, keep: object = None) -> torch.Tensor:
        """Multiply."""
        self.seen = str(x.device)
        self.kept = keep
        return 2 * x if by is None else x * by


def attached(module: nn.Module, device: torch.device | None = DEVICE) -> AttachedForward:
    forward = AttachedForward(module, device, ("keep",))
    forward.attach()
    return forward


def test_inputs_come_to_the_device_by_position_and_by_name() -> None:
    module = Scale()
    attached(module)
    output = module(torch.ones(2), by=torch.full((2,), 3.0))
    assert module.seen == str(output.device) == "virtual:0"
    assert output.cpu().tolist() == [3, 3]


def test_inputs_named_by_skip_keys_stay_where_they_are() -> None:
    module, kept = Scale(), torch.ones(2)
    attached(module)
    module(torch.ones(2), keep=kept)
    assert module.kept is kept


def test_the_output_goes_back_to_the_input_or_to_a_device() -> None:
    module = Scale()
    forward = attached(module)
    forward.returns_to_input = True
    assert module(torch.ones(2)).device.type == "cpu"
    forward.returns_to_input, forward.output_device = False, torch.device("virtual:1")
    assert str(module(torch.ones(2)).device) == "virtual:1"


def test_without_a_device_nothing_is_moved() -> None:
    module, x = Scale(), torch.ones(2)
    attached(module, None)
    assert module(x).device.type == "cpu"


def test_an_attached_forward_looks_like_the_forward_it_stands_for() -> None:
    module = Scale()
    forward = attached(module)
    assert inspect.signature(module.forward) == inspect.signature(Scale().forward)
    assert forward.__doc__ == "Multiply."


def test_detaching_gives_the_module_its_own_forward_back() -> None:
    module = Scale()
    module.forward = own = lambda x: x + 1  # type: ignore[method-assign]
    forward = attached(module)
    assert module(torch.ones(1)).cpu().item() == 2
    forward.detach()
    assert module.forward is own
    plain = Scale()
    attached(plain).detach()
    assert "forward" not in plain.__dict__


def test_an_attached_forward_keeps_no_module_alive() -> None:
    module = Scale()
    forward = attached(module)
    del module
    forward.detach()


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("thing", [AttachedForward(Scale(), None, None), RefuseConversion(Scale(), ())])
def test_an_attached_forward_is_not_copied(attempt: object, thing: object) -> None:
    with pytest.raises(DispatchError, match="undispatch"):
        attempt(thing)  # type: ignore[operator]
