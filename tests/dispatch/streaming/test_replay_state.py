"""A second computation is the first one again: random numbers, precision and statistics.

Dataclasses are opened for autograd and put together again.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from bigmodel.dispatch.streaming.replay_state import (
    Precision,
    Surroundings,
    closed,
    opened,
    refuse_hidden_tensors,
    unchanged_buffers,
)
from bigmodel.errors import DispatchError

from ...accelerators import at

pytestmark = pytest.mark.usefixtures("every_accelerator")


def test_random_numbers_are_drawn_again_and_those_of_others_go_on() -> None:
    torch.manual_seed(0)
    surroundings = Surroundings(torch.device(at(0)))
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


@dataclass(frozen=True)
class Inner:
    tensor: torch.Tensor
    count: int = 1


@dataclass
class Outer:
    inner: Inner
    others: list[Inner]
    kind: type = Inner


Pair = namedtuple("Pair", "first second")


def made() -> Outer:
    return Outer(Inner(torch.zeros(2)), [Inner(torch.ones(3), count=2)])


def test_every_tensor_is_a_leaf_of_what_is_opened() -> None:
    leaves = tree_leaves(opened({"a": (made(), 1), "b": Pair(torch.ones(1), made())}))
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 5


def test_closed_gives_what_was_opened_with_the_tensors_put_in_their_places() -> None:
    leaves, structure = tree_flatten(opened((made(), "text")))
    again, text = closed(
        tree_unflatten([leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
    )
    assert (type(again), type(again.inner), again.kind, text) == (Outer, Inner, Inner, "text")
    assert (again.inner.tensor.tolist(), again.inner.count) == ([1, 1], 1)
    assert (again.others[0].tensor.tolist(), again.others[0].count) == ([2, 2, 2], 2)


def test_what_was_opened_stays_as_it_was() -> None:
    value = made()
    inner = value.inner
    closed(opened(value))
    assert value.inner is inner


def test_a_tensor_in_an_object_of_another_kind_is_refused_unless_that_was_handed_through() -> None:
    hiding = SimpleNamespace(states=torch.ones(2))
    with pytest.raises(DispatchError, match=r"SimpleNamespace.*'states'.*register_pytree_node"):
        refuse_hidden_tensors((torch.ones(1), hiding), ((), {}))
    refuse_hidden_tensors((torch.ones(1), hiding), ((hiding,), {}))
    refuse_hidden_tensors((torch.ones(1), SimpleNamespace(count=2), None), ((), {}))
