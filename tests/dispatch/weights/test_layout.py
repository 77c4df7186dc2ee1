import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigmodel import dispatch_model
from bigmodel.devices.nested import storage_of
from bigmodel.dispatch.weights.layout import Layout, largest, strides_when_moved
from bigmodel.limits import ALIGNMENT

from ...accelerators import at

shapes = st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64])


@given(st.lists(st.tuples(dtypes, shapes), max_size=8))
def test_views_are_aligned_apart_and_of_the_right_kind(tensors: list[tuple[torch.dtype, torch.Size]]) -> None:
    layout = Layout.of(tensors)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for number, view in enumerate(layout.views(memory), start=1):
        view.copy_(torch.full(view.shape, number % 2, dtype=torch.float32))
    for number, (view, place, (dtype, shape)) in enumerate(zip(layout.views(memory), layout.places, tensors), start=1):
        assert (view.dtype, view.shape) == (dtype, shape)
        assert place.offset % ALIGNMENT == 0
        assert view.double().sum() == (number % 2) * shape.numel()


def test_strides_are_those_of_a_copy_on_another_device() -> None:
    tensors = [torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(8, 8)[::2].t(), torch.ones(3)]
    strides = [strides_when_moved(each) for each in tensors]
    assert strides == [(48, 1, 12, 3), (1, 8), None]
    layout = Layout.of(((each.dtype, each.shape) for each in tensors), strides)
    found = [view.stride() for view in layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))]
    assert found == [(48, 1, 12, 3), (1, 8), (1,)]


@pytest.mark.usefixtures("every_accelerator")
def test_weights_in_channels_last_are_streamed_in_channels_last() -> None:
    model, x = (
        torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last),
        torch.ones(1, 4, 4, 4),
    )
    seen: list[tuple[int, ...]] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.stride()))
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    with torch.no_grad():
        model(x)
    assert [*seen, model[0].weight.stride()] == [(36, 1, 12, 4)] * 2


def test_the_largest_layout_sets_the_slots_size() -> None:
    small, big = Layout.of([(torch.int8, torch.Size([3]))]), Layout.of([(torch.float32, torch.Size([1000]))])
    assert largest([small, big]) == big.nbytes == 4096
    assert largest([]) == 0


def test_views_of_packed_memory_lie_in_its_memory_and_nothing_else_does() -> None:
    memory = torch.empty(64, dtype=torch.uint8)
    parameter = torch.nn.Parameter(memory[8:16].view(torch.float32))
    assert {storage_of(part) for part in (memory[4:], parameter, parameter.detach())} == {storage_of(memory)}
    assert storage_of(memory.clone()) != storage_of(memory)
