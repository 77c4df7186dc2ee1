"""A tensor in parts is a real tensor: read, indexed, written, saved and copied like the whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bigmodel.dispatch.weights.fused_view import FusedView, PartOfTensor, lies_on_disk

EXPERTS, ROWS, COLUMNS = 4, 2, 3


def fused() -> tuple[FusedView, torch.Tensor]:
    """Return experts whose gate and up projections lie apart, and the plain tensor of the same values."""
    whole = torch.randn(EXPERTS, 2 * ROWS, COLUMNS)
    parts = []
    for expert in range(EXPERTS):
        for start in (0, ROWS):
            index = (expert, slice(start, start + ROWS))
            parts.append(PartOfTensor(whole[index].clone(), index))
    return FusedView(parts, whole.shape), whole


READS: list[Callable[[torch.Tensor], object]] = [
    lambda t: t.clone(),
    lambda t: t[1],
    lambda t: t[-1, 2:, 0],
    lambda t: t[torch.tensor([2, 0])],
    lambda t: t.transpose(1, 2) @ t,
    lambda t: t.to(torch.float64),
    lambda t: t.reshape(-1),
    lambda t: nn.functional.linear(torch.ones(5, COLUMNS), t[2]),
    lambda t: torch.cat([t, t]),
    lambda t: torch.tensor(t.numpy()),
    lambda t: torch.tensor(t.tolist()),
    lambda t: t.chunk(2, dim=1)[1],
]


@pytest.mark.parametrize("read", READS)
def test_every_way_of_reading_gives_what_the_plain_tensor_gives(read: Callable[[torch.Tensor], object]) -> None:
    view, whole = fused()
    for tensor in (view, nn.Parameter(view, requires_grad=False)):
        assert torch.equal(read(tensor), read(whole))  # type: ignore[arg-type]


def test_a_fused_view_looks_like_the_plain_tensor() -> None:
    view, whole = fused()
    parameter = nn.Parameter(view)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    for tensor in (view, parameter, parameter.detach()):
        assert (tensor.shape, tensor.dtype, tensor.device) == (whole.shape, whole.dtype, whole.device)
        assert tensor.stride() == whole.stride()


WRITES: list[Callable[[torch.Tensor], object]] = [
    lambda t: t.add_(1),
    lambda t: t.mul_(2).sub_(1),
    lambda t: t[2].zero_(),
    lambda t: t.copy_(torch.arange(t.numel()).view(t.shape)),
    lambda t: t.__setitem__(1, 7.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_it_or_to_one_expert_of_it_reaches_the_parts(write: Callable[[torch.Tensor], object]) -> None:
    view, whole = fused()
    parameter = nn.Parameter(view, requires_grad=False)
    before = parameter._version
    write(parameter)
    write(whole)
    assert torch.equal(parameter, whole)
    assert all(torch.equal(part.value, whole[part.index]) for part in view.parts)
    assert parameter._version > before


def test_an_optimizer_can_train_it() -> None:
    view, whole = fused()
    parameter, plain = nn.Parameter(view), nn.Parameter(whole)
    for tensor in (parameter, plain):
        tensor.square().sum().backward()
        torch.optim.SGD([tensor], lr=0.1).step()
    assert torch.equal(parameter, plain)


def test_copies_and_files_hold_a_plain_tensor() -> None:
    view, whole = fused()
    module = nn.Module()
    module.weight = nn.Parameter(view)
    copied = copy.deepcopy(module).weight
    assert type(copied) is nn.Parameter
    assert torch.equal(copied, whole)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], whole)


def test_asked_for_an_address_it_fails_loudly() -> None:
    view, _ = fused()
    with pytest.raises(RuntimeError, match="several tensors"):
        view.data_ptr()


def test_the_parts_of_one_expert() -> None:
    view, whole = fused()
    parts = view.parts_of(3)
    assert [part.index for part in parts] == [(slice(0, 2),), (slice(2, 4),)]
    assert torch.equal(torch.cat([part.value for part in parts]), whole[3])


def test_an_expert_that_is_not_there() -> None:
    view, _ = fused()
    with pytest.raises(IndexError, match="out of bounds"):
        view[EXPERTS]


def test_memory_is_not_disk() -> None:
    view, whole = fused()
    assert not lies_on_disk(view)
    assert not lies_on_disk(whole)
