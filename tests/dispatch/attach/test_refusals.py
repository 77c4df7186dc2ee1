"""A dispatched model refuses copies and conversions."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from bigmodel.dispatch.attach.attached_forward import AttachedForward
from bigmodel.dispatch.attach.refusals import RefuseConversion
from bigmodel.errors import DispatchError

CPU = torch.device("cpu")


@pytest.mark.parametrize("attempt", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("thing", [AttachedForward(nn.ReLU(), None, None), RefuseConversion(nn.ReLU(), ())])
def test_what_is_attached_is_neither_copied_nor_pickled(attempt: object, thing: object) -> None:
    with pytest.raises(DispatchError, match="undispatch"):
        attempt(thing)  # type: ignore[operator]


def test_only_conversions_that_change_nothing_are_accepted() -> None:
    module = nn.Linear(2, 2)
    module.__dict__["_apply"] = RefuseConversion(module, {CPU})
    assert module.to("cpu") is module
    with pytest.raises(DispatchError, match="cannot be moved or cast"):
        module.half()
