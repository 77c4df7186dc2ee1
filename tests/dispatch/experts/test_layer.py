"""The experts of one layer: blocks of their own on the host, and a stand-in for their module during a call."""

from __future__ import annotations

import torch
from torch import nn

from bigmodel.dispatch.experts.layer import ExpertLayer, stand_in
from bigmodel.dispatch.weights.block import HostTensor


def layer(experts: int = 3, rows: int = 4, columns: int = 16) -> ExpertLayer:
    """Return a layer of two fused tensors, expert e of which is filled with e and -e."""
    values = torch.arange(experts).float().view(-1, 1, 1)
    up, down = values.expand(-1, rows, columns).contiguous(), -values.expand(-1, columns, rows).contiguous()
    registry = {"up": nn.Parameter(up), "down": nn.Parameter(down)}
    tensors = {name: HostTensor(value, torch.float32, [(registry, name)]) for name, value in registry.items()}
    return ExpertLayer("experts", tensors)


def test_bytes_of_one_expert_and_of_all() -> None:
    made = layer()
    assert made.experts == 3
    assert made.expert_bytes == 2 * 4 * 16 * 4
    assert made.whole_bytes == 2 * 1024  # each tensor's 768 bytes, aligned
    assert made.layout.nbytes == 2 * 512
    assert not made.on_disk


def test_a_block_is_one_experts_share() -> None:
    made = layer()
    memory = torch.zeros(made.layout.nbytes, dtype=torch.uint8)
    made.block(2).fetch(memory)
    up, down = made.layout.views(memory)
    assert (up.shape, down.shape) == ((4, 16), (16, 4))
    assert (up.unique().tolist(), down.unique().tolist()) == ([2], [-2])


def test_slots_look_like_fused_tensors() -> None:
    made = layer()
    memory = torch.zeros(5, made.layout.nbytes, dtype=torch.uint8)
    made.block(1).fetch(memory[3])
    rows = made.rows(memory)
    assert rows["up"].shape == (5, 4, 16)
    assert rows["up"][3].unique().tolist() == [1]
    assert rows["up"][0].unique().tolist() == [0]


def test_writing_and_replacing_change_the_version() -> None:
    made = layer()
    first, block = made.version(), made.block(0)
    with torch.no_grad():
        made.tensors["up"].value[0] = 7
    written = made.version()
    registry, key = made.tensors["up"].owners[0]
    registry[key] = nn.Parameter(torch.ones(3, 4, 16))
    assert len({first, written, made.version()}) == 3
    assert made.block(0) is not block


def test_layers_of_one_signature_fit_the_same_slots() -> None:
    assert layer().signature == layer(experts=7).signature
    assert layer().signature != layer(rows=8).signature


def test_all_experts_are_one_block_too() -> None:
    made = layer()
    assert made.as_plain_block().nbytes == 3 * made.expert_bytes


def test_the_layer_computes_with_its_other_attributes_and_the_module_stays_as_it_was() -> None:
    module = nn.Linear(3, 3, bias=False)
    own, other = module.weight, torch.eye(3)
    x = torch.arange(3.0)
    assert torch.equal(stand_in(module, weight=other)(x), x)
    assert module.weight is own
    assert torch.equal(module(x), x @ own.t())


def test_the_layer_runs_its_class_own_forward() -> None:
    module = nn.ReLU()
    module.forward = lambda x: x * 0  # type: ignore[method-assign]
    assert torch.equal(stand_in(module)(torch.ones(2)), torch.ones(2))
