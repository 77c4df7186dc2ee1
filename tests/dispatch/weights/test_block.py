"""A streamed block: host tensors, a memory, and what the module sees meanwhile."""

import pytest
import torch
from torch import nn

from bigmodel.dispatch.weights.block import Block, HostTensor, version_of
from bigmodel.errors import DispatchError


def block_of(module: nn.Module) -> Block:
    return Block(
        "module",
        [
            HostTensor(value, value.dtype, [(module._parameters, name)], name=name)
            for name, value in module._parameters.items()
            if value is not None
        ],
    )


def fetched(block: Block) -> list[torch.Tensor]:
    memory = torch.zeros(block.layout.nbytes, dtype=torch.uint8)
    block.fetch(memory)
    return block.device_views(memory)


def test_a_module_sees_device_memory_while_it_is_shown_and_its_own_tensors_afterwards() -> None:
    module = nn.Linear(3, 2)
    weight, bias = module.weight, module.bias
    block = block_of(module)
    views = fetched(block)
    block.show(views)
    assert module.weight is views[0]
    assert torch.equal(module.weight, weight)
    block.show_host()
    assert (module.weight, module.bias) == (weight, bias)


def test_packing_moves_the_bytes_and_keeps_the_parameters() -> None:
    module = nn.Linear(3, 2)
    weight, values = module.weight, module.weight.detach().clone()
    block = block_of(module)
    block.pack(pin=False)
    assert module.weight is weight
    assert torch.equal(weight, values)
    assert block.packed is not None
    assert weight.untyped_storage().data_ptr() == block.packed.untyped_storage().data_ptr()
    assert torch.equal(fetched(block)[0], values)


def test_writing_to_a_tensor_changes_the_version() -> None:
    module = nn.Linear(3, 2)
    block = block_of(module)
    before = block.version()
    with torch.no_grad():
        module.weight.add_(1)
    assert block.version() > before
    with torch.inference_mode():
        assert version_of(torch.ones(1)) == 0


def test_a_replacement_is_taken_over_if_it_fits() -> None:
    module = nn.Linear(3, 2)
    block = block_of(module)
    assert not block.adopt_replaced()[0]
    module.weight = nn.Parameter(torch.full((2, 3), 7.0))
    assert block.adopt_replaced()[0]
    assert torch.equal(fetched(block)[0], module.weight)
    module.weight = nn.Parameter(torch.ones(5))
    with pytest.raises(DispatchError, match="'weight' of 'module'"):
        block.adopt_replaced()


def test_state_that_a_forward_wrote_is_kept() -> None:
    module = nn.BatchNorm1d(2)
    buffer = module.running_mean
    assert buffer is not None
    block = Block("norm", [HostTensor(buffer, buffer.dtype, [(module._buffers, "running_mean")], is_buffer=True)])
    (view,) = fetched(block)
    view.fill_(3)
    block.show([view])
    assert not block.keep_state([view], written=False)
    assert torch.equal(buffer, torch.full((2,), 3.0))


def test_state_that_a_forward_put_in_the_place_of_a_buffer_is_kept() -> None:
    module = nn.BatchNorm1d(2)
    buffer = module.running_mean
    block = Block("norm", [HostTensor(buffer, buffer.dtype, [(module._buffers, "running_mean")], is_buffer=True)])
    views = fetched(block)
    block.show(views)
    module.running_mean = torch.full((2,), 5.0)
    block.keep_state(views, written=False)
    block.show_host()
    assert module.running_mean is buffer
    assert buffer.tolist() == [5, 5]
    module.running_mean = None
    with pytest.raises(DispatchError, match="'running_mean' of 'norm' was removed"):
        block.keep_state(views, written=False)


def test_writes_to_parameters_are_counted_apart_from_those_to_buffers() -> None:
    module = nn.BatchNorm1d(2)
    tensors = [
        HostTensor(value, value.dtype, [(registry, name)], is_buffer=registry is module._buffers)
        for registry in (module._parameters, module._buffers)
        for name, value in registry.items()
        if value is not None
    ]
    block = Block("norm", tensors)
    memory = torch.zeros(block.layout.nbytes, dtype=torch.uint8)
    weight, _, mean, *_ = block.device_views(memory)
    before = memory._version
    mean.add_(1)
    assert memory._version == before
    with torch.no_grad():
        weight.add_(1)
    assert memory._version > before
    assert block.layout.views(memory)[2].tolist() == [1, 1]


def test_a_parameter_that_a_forward_replaced_is_kept_and_others_are_not_rounded() -> None:
    module = nn.Linear(3, 2)
    weight, exact = module.weight, module.weight.detach().clone()
    tensors = [HostTensor(p, torch.bfloat16, [(module._parameters, name)]) for name, p in module.named_parameters()]
    block = Block("module", tensors)
    views = fetched(block)
    block.show(views)
    assert not block.keep_state(views, written=False)
    module.bias = nn.Parameter(torch.full((2,), 5.0, dtype=torch.bfloat16))
    assert block.keep_state(views, written=False)
    block.show_host()
    assert module.weight is weight
    assert torch.equal(weight, exact)
    assert module.bias.tolist() == [5, 5]
    block.show(views)
    module.bias = None
    with pytest.raises(DispatchError, match=r"'bias' of 'module' was removed.*map it to a device"):
        block.keep_state(views, written=False)
