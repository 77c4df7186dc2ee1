"""Tensors that a streamed block hands on in attributes: no gradient through them is lost without a word."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bigmodel import dispatch_model
from bigmodel.dispatch.streaming.kept_tensors import FollowedTensors
from bigmodel.errors import DispatchError

from ...accelerators import at

pytestmark = pytest.mark.usefixtures("every_accelerator")


class Giving(nn.Module):
    def __init__(self, shared: SimpleNamespace, detached: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shared, self.detached = shared, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.shared.skip = (2 * y).detach() if self.detached else 2 * y
        self.shared.table = torch.ones(4, device=x.device).cos()
        return y


class Taking(nn.Module):
    def __init__(self, shared: SimpleNamespace, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shared, self.name = shared, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) + getattr(self.shared, self.name)
        return found


def pair(name: str, detached: bool = False) -> nn.Module:
    """Return two blocks, streamed, of which the second reads what the first keeps."""
    shared = SimpleNamespace()
    model = nn.Sequential(Giving(shared, detached), Taking(shared, name))
    return dispatch_model(model, {"": "cpu"}, main_device=at(0), no_split_module_classes=["Giving", "Taking"])


def test_a_gradient_that_reaches_what_a_block_has_kept_is_refused() -> None:
    model = pair("skip")
    with torch.no_grad():
        assert model(torch.ones(1, 4, device=at(0))).shape == (1, 4)
    for _ in range(2):
        output = model[0](torch.ones(1, 4, device=at(0)))
        with pytest.raises(DispatchError, match="'0', which is streamed, hands a tensor on in an attribute"):
            (output + model[0].shared.skip).sum().backward()


def test_another_block_that_reads_what_a_block_has_kept_is_refused_in_backward() -> None:
    output = pair("skip")(torch.ones(1, 4, device=at(0)))
    with pytest.raises(DispatchError, match="'0', which is streamed, hands a tensor on in an attribute"):
        output.sum().backward()


class GivingLater(Giving):
    """Keeps nothing in its first two forwards."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += not torch.is_grad_enabled()  # recomputed with gradients
        return super().forward(x) if self.forwards > 2 else self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("detached", [False, True])
def test_what_a_block_begins_to_keep_in_a_later_forward_is_seen(detached: bool) -> None:
    block = GivingLater(SimpleNamespace(), detached)
    model = dispatch_model(
        nn.Sequential(block), {"": "cpu"}, main_device=at(0), no_split_module_classes=["GivingLater"]
    )
    x = torch.ones(1, 4, device=at(0))
    for _ in range(2):
        model(x).sum().backward()
    output = model(x) + block.shared.skip
    if detached:
        output.sum().backward()
        return
    with pytest.raises(DispatchError, match="'0', which is streamed, hands a tensor on in an attribute"):
        output.sum().backward()


def test_blocks_whose_attributes_stay_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair("table", detached=True)
    x = torch.ones(1, 4, device=at(0))
    model(x).sum().backward()
    monkeypatch.delattr(FollowedTensors, "__torch_dispatch__")
    for _ in range(2):
        model(x).sum().backward()


def test_what_is_detached_may_be_kept() -> None:
    model = pair("skip", detached=True)
    model(torch.ones(1, 4, device=at(0))).sum().backward()
    assert model[0].linear.weight.grad is not None


def test_what_depends_on_no_weight_may_be_kept() -> None:
    model = pair("table")
    model(torch.ones(1, 4, device=at(0))).sum().backward()
    assert model[0].linear.weight.grad is not None


def test_what_no_gradient_reaches_may_be_kept() -> None:
    model = pair("table")
    kept = model(torch.ones(1, 4, device=at(0))).sum()
    assert model[0].shared.skip.shape == (1, 4)
    kept.backward()
    assert model[0].linear.weight.grad is not None


def test_tensors_are_followed_through_operations_that_write() -> None:
    source = torch.ones(2)
    with torch.no_grad(), FollowedTensors([source]) as followed:
        target = torch.zeros(2)
        target.add_(source)
        derived, other = target * 2, torch.ones(2) * 2
    assert {id(each) for each in followed.kept([])} == {id(target), id(derived)}
    assert followed.kept([target]) == [derived] or len(followed.kept([target])) == 1
    assert other.sum() == 4
