"""Whether there is room for gradients and an optimizer's state beside the weights that are trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.devices import virtual
from bigmodel.dispatch import dispatch_model
from bigmodel.dispatch.attach.dispatched import Dispatched, dispatched
from bigmodel.dispatch.placement.tensors import DeviceMapLookup, PlacedTensor
from bigmodel.dispatch.training import TRAINING_COPIES, TRAINING_SHARE, check_host, fits_training, nbytes_of
from bigmodel.errors import DispatchError

pytestmark = pytest.mark.usefixtures("accelerators")

NBYTES = 32 * 32 * 4


def linear(**options: object) -> tuple[Dispatched, list[PlacedTensor]]:
    """A dispatched model of one weight on the accelerator, and its places."""
    model = dispatch_model(nn.Linear(32, 32, bias=False), {"": 0}, force_hooks=True, **options)
    found = dispatched(model)
    assert found is not None
    return found, list(DeviceMapLookup(dict(found.resolved.devices), found.main_device).tensors(model))


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-8, False)])
def test_an_accelerator_has_room_if_what_is_kept_takes_its_share_of_what_is_free(spare: int, fits: bool) -> None:
    found, placed = linear()
    virtual.configure(0, capacity=NBYTES + int(TRAINING_COPIES * NBYTES / TRAINING_SHARE) + spare)
    assert fits_training("virtual:0", placed, placed, found) is fits


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-8, False)])
def test_a_budget_is_the_end_of_an_accelerators_memory(spare: int, fits: bool) -> None:
    found, placed = linear(
        max_memory={0: NBYTES + int(TRAINING_COPIES * NBYTES / TRAINING_SHARE) + spare, "cpu": "1GB"}
    )
    assert fits_training("virtual:0", placed, placed, found) is fits


def test_the_host_is_asked_for_the_weights_and_their_gradients() -> None:
    found, placed = linear(max_memory={0: "1MB", "cpu": 2 * NBYTES})
    check_host([], placed, placed, found)
    found, placed = linear(max_memory={0: "1MB", "cpu": 2 * NBYTES - 1})
    with pytest.raises(DispatchError, match=r"weight\. Training needs 8\.00 KiB of host memory.*1 B more"):
        check_host([], placed, placed, found)


def test_tied_weights_count_once() -> None:
    weight = torch.ones(3)
    places = [PlacedTensor(name, {}, name, weight, "cpu", "cpu", False) for name in ("embed", "head")]
    assert nbytes_of(places) == 12
