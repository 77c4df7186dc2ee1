"""Tensors come to the host through pinned memory, with one wait for many."""

from __future__ import annotations

import pytest
import torch

from bigmodel.devices import virtual
from bigmodel.dispatch.transfer.to_host import copied_to_host

from ...accelerators import at

pytestmark = pytest.mark.usefixtures("every_accelerator")


def tensors() -> dict[str, torch.Tensor]:
    """Tensors on the host, of several layouts and dtypes."""
    return {
        "plain": torch.arange(12.0).reshape(3, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "channels last": torch.arange(48.0).reshape(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "with gaps": torch.arange(24.0).reshape(4, 6)[:, ::2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "half": torch.arange(7, dtype=torch.bfloat16),
        "number": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "large": torch.arange(3000.0).view(3, 1000),
        "complex": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    }


@pytest.mark.parametrize("staging_bytes", [2**20, 4096, 0])
def test_values_and_strides_are_those_of_a_plain_copy(staging_bytes: int) -> None:
    sources = [tensor.to(at(0)) for tensor in tensors().values()]
    found = copied_to_host([*sources, None], [*tensors().values(), torch.empty(0)], staging_bytes)
    assert found.pop() is None
    for source, other in zip(sources, found, strict=True):
        expected = source.cpu()
        assert other is not None
        assert torch.equal(other, expected)
        assert (other.dtype, other.stride()) == (expected.dtype, expected.stride())


def test_a_tensor_is_cast_where_it_is() -> None:
    (found,) = copied_to_host([torch.full((3,), 1 / 3, device=at(0))], [torch.empty(3, dtype=torch.bfloat16)])
    assert found is not None
    assert torch.equal(found, torch.full((3,), 1 / 3).bfloat16())


def test_a_tensor_that_stays_on_its_device_is_not_copied() -> None:
    tensor = torch.ones(3, device=at(0))
    (found,) = copied_to_host([tensor], [tensor])
    assert found is tensor


@pytest.mark.virtual_only("counts waits of the host")
def test_the_host_waits_once_for_many_tensors_and_never_in_a_copy() -> None:
    sources = [torch.full((100,), float(number), device=at(0)) for number in range(20)]
    before = virtual.host_waits()
    found = copied_to_host(sources, [torch.empty(0)] * 20)
    assert virtual.host_waits().since(before) == (0, 0, 1)
    assert [float(each[0]) for each in found if each is not None] == list(range(20))


@pytest.mark.virtual_only("counts waits of the host")
def test_a_large_tensor_is_copied_in_pieces_while_the_host_moves_the_last_one() -> None:
    source = torch.arange(2048.0, device=at(0))
    reserved = virtual.pinned_memory.reserved
    before = virtual.host_waits()
    (found,) = copied_to_host([source], [torch.empty(0)], 4096)
    assert virtual.host_waits().since(before) == (0, 0, 4)
    assert found is not None
    assert torch.equal(found, torch.arange(2048.0))
    assert virtual.pinned_memory.reserved == reserved
