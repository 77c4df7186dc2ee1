"""A second computation is the first one again: random numbers, precision and statistics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bigmodel.devices import virtual
from bigmodel.dispatch.streaming.replay_state import Precision, ReplayState, refuse_hidden_tensors, unchanged_buffers
from bigmodel.errors import DispatchError

from ...accelerators import at

pytestmark = pytest.mark.usefixtures("every_accelerator")


def test_random_numbers_are_drawn_again_and_those_of_others_go_on() -> None:
    torch.manual_seed(0)
    surroundings = ReplayState(torch.device(at(0)))
    first, following = torch.rand(3), torch.rand(3)
    torch.manual_seed(0)
    torch.rand(3)
    with surroundings.restored():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), following)


@pytest.mark.parametrize("kind", ["cpu", "device"])
def test_the_precision_is_that_of_the_first_time(kind: str) -> None:
    kind = torch.device(at(0)).type if kind == "device" else kind
    with torch.autocast(kind, dtype=torch.bfloat16):
        precision = Precision(torch.device(at(0)))
    assert not torch.is_autocast_enabled(kind)
    with precision.restored():
        assert (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) == (True, torch.bfloat16)
    outside = Precision(torch.device(at(0)))
    with torch.autocast(kind, dtype=torch.bfloat16), outside.restored():
        assert not torch.is_autocast_enabled(kind)


def test_statistics_count_once() -> None:
    norm = nn.BatchNorm1d(4).to(at(0))
    norm(torch.randn(3, 4, device=at(0)))
    before = [buffer.clone() for buffer in norm.buffers()]
    with unchanged_buffers(norm):
        norm(torch.randn(3, 4, device=at(0)))
    assert all(torch.equal(buffer, kept) for buffer, kept in zip(norm.buffers(), before))


@pytest.mark.virtual_only("counts waits of the host")
def test_the_host_waits_once_to_compare_all_statistics() -> None:
    norms = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(5))).to(at(0))
    before = virtual.host_waits()
    with unchanged_buffers(norms):
        norms(torch.randn(3, 4, device=at(0)))
    assert virtual.host_waits().since(before) == (0, 1, 0)
    assert all(int(norm.num_batches_tracked) == 0 for norm in norms)


def test_a_tensor_in_an_object_of_another_kind_is_refused_unless_that_was_handed_through() -> None:
    hiding = SimpleNamespace(states=torch.ones(2))
    with pytest.raises(DispatchError, match=r"SimpleNamespace.*'states'.*register_pytree_node"):
        refuse_hidden_tensors((torch.ones(1), hiding), ((), {}))
    refuse_hidden_tensors((torch.ones(1), hiding), ((hiding,), {}))
    refuse_hidden_tensors((torch.ones(1), SimpleNamespace(count=2), None), ((), {}))
