"""Undispatching gives the plain model back. What `test_dispatch` dispatches it undoes, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.dispatch import dispatch_model, undispatch
from bigmodel.errors import DispatchError

from ..accelerators import at, exact
from .models import ids, resident_output, stack

pytestmark = pytest.mark.usefixtures("accelerators")


@exact
@pytest.mark.parametrize("device", [None, "cpu", "virtual:1"])
def test_the_plain_model_is_on_the_host_or_where_it_is_wanted(device: str | None) -> None:
    expected = resident_output(stack(), ids())
    model = undispatch(dispatch_model(stack(), {"": 0, "blocks.1": 1, "blocks.2": "cpu"}), device)
    where = torch.device(device or "cpu")
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {where}
    assert model.head.weight is model.embed.weight
    assert not any("forward" in module.__dict__ or "_apply" in module.__dict__ for module in model.modules())
    assert torch.equal(model.to(at(0))(ids().to(at(0))).cpu(), expected)


def test_a_plain_model_is_returned_as_it_is() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    assert undispatch(model, 0).weight is weight


class WhileRunning(nn.Linear):
    """Calls a given function within its forward."""

    work = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.work()
        return super().forward(x)


@exact
def test_a_model_is_not_undispatched_while_it_runs() -> None:
    model = dispatch_model(nn.Sequential(WhileRunning(8, 8), nn.Linear(8, 8)), {"": "cpu"}, main_device=0)
    host = list(model.parameters())
    model[0].work = lambda: undispatch(model)
    with pytest.raises(DispatchError, match="is running"):
        model(torch.ones(1, 8))
    del model[0].work
    model(torch.ones(1, 8))
    undispatch(model)
    assert all(p is each for p, each in zip(model.parameters(), host, strict=True))
