"""Modules that hold their weights on the host, on fake tensors: what lies where, and what a backward gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bigmodel.profile.trace.session import fake_clone
from bigmodel.profile.training.streamed_call import hold_on_host

from ..models import Stack

pytestmark = pytest.mark.usefixtures("accelerators")

HOST = torch.device("cpu")


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.autograd.set_multithreading_enabled(False):
        yield mode  # the mode belongs to this thread, so backward must not take another


def device() -> torch.device:
    """The first virtual accelerator; its name is known only once it is enabled."""
    return torch.device("virtual:0")


def fake(mode: FakeTensorMode, **options: bool) -> nn.Module:
    return fake_clone(Stack(**options), mode, device(), {}).requires_grad_(True)


def ids() -> torch.Tensor:
    return torch.zeros(2, 3, dtype=torch.long, device=device())


@pytest.mark.slow
def test_weights_are_on_the_host_and_results_on_the_device(mode: FakeTensorMode) -> None:
    model = fake(mode)
    slots = hold_on_host(model, ["blocks.1", "embed"], device())
    on_host = {name for name, parameter in model.named_parameters() if parameter.device == HOST}
    assert on_host == {name for name, _ in model.named_parameters() if name.startswith(("blocks.1.", "embed."))}
    assert model(ids()).device == device()
    # Rows of a table are brought without a slot.
    assert {slot.device for slot in slots} == {device()}
    assert sum(slot.nbytes for slot in slots) == sum(p.nbytes for p in Stack().blocks[1].parameters())


@pytest.mark.slow
def test_gradients_are_on_the_device_of_their_weights(mode: FakeTensorMode) -> None:
    model = fake(mode)
    hold_on_host(model, ["blocks.0", "blocks.1", "embed"], device())
    model(ids()).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.device, parameter.grad.shape) == (parameter.device, parameter.shape)


def test_a_frozen_weight_gets_no_gradient(mode: FakeTensorMode) -> None:
    model = fake(mode).requires_grad_(False)
    model.head.requires_grad_(True)
    hold_on_host(model, ["blocks.0", "head"], device())
    model(ids()).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == ["head.weight"]


def test_weights_are_on_the_device_only_during_compute(mode: FakeTensorMode) -> None:
    model, seen = fake(mode), []
    model.blocks[1].up.register_forward_hook(lambda module, *_: seen.append(module.weight.device))
    hold_on_host(model, ["blocks.1"], device())
    model(ids()).sum().backward()
    assert seen == [device(), device()]
    assert model.blocks[1].up.weight.device == HOST


def test_tied_weights_stay_tied(mode: FakeTensorMode) -> None:
    model = fake(mode, tied=True)
    hold_on_host(model, ["embed", "head"], device())
    assert model.embed.weight is model.head.weight
    assert model.head.weight.device == HOST
