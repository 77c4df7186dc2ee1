"""Modules added to a dispatched model run and are trained without any further call, as on the resident model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import save_model
from bigmodel.dispatch import dispatch_model, load_checkpoint_and_dispatch, prepare_training, undispatch
from bigmodel.dispatch.attach.additions import Additions
from bigmodel.dispatch.weights.block import HostTensor

from ...accelerators import at, exact
from ...examples import alike
from ..models import ids, llama, stack
from ..streaming.test_gradients import assert_same, gradients

pytestmark = [pytest.mark.usefixtures("every_accelerator"), exact]

TOKENS = torch.arange(16).view(2, 8)
LAST_IS_OFFLOADED = {"": 0, "blocks.2": "cpu", "blocks.3": "cpu", "head": "cpu", "embed": "cpu"}


class Adapted(nn.Module):
    """A layer with an adapter that has parameters, a buffer, and statistics that each forward changes."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)
        self.register_buffer("scale", torch.full((), 0.5))
        self.to(base_layer.weight.device)
        self.base_layer = base_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.norm(self.down(x))) * self.scale


def adapted(model: nn.Module) -> nn.Module:
    """Freeze `model`, and give some layers, the head among them, adapters."""
    torch.manual_seed(5)
    model.requires_grad_(False)
    for block in model.blocks[1:]:
        block.up = Adapted(block.up)
    model.head = Adapted(model.head)
    return model


def trained(model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[float]:
    """Train by a plain loop; return the losses."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@alike("device_map", [{"": "cpu"}, LAST_IS_OFFLOADED], first=1)
def test_they_are_trained_by_a_plain_loop(device_map: dict[str, Any]) -> None:
    resident = adapted(stack().train().to(at(0)))
    model = adapted(dispatch_model(stack().train(), device_map, main_device=at(0)))
    assert trained(model, ids()) == trained(resident, ids().to(at(0)))
    assert_same(gradients(model), gradients(resident))
    for (name, value), expected in zip(model.state_dict().items(), resident.state_dict().values(), strict=True):
        assert torch.equal(value.cpu(), expected.cpu()), name


@pytest.mark.slow
def test_the_checkpoint_of_a_model_on_disk_stays(tmp_path: Path) -> None:
    save_model(stack(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    model = load_checkpoint_and_dispatch(stack(1).train(), tmp_path, device_map={"": "disk"}, main_device=at(0))
    assert trained(adapted(model), ids()) == trained(adapted(stack().train().to(at(0))), ids().to(at(0)))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
def test_further_ones_are_found_later_and_those_removed_are_left_out() -> None:
    model = adapted(dispatch_model(stack().train(), {"": "cpu"}, main_device=at(0)))
    trained(model, ids(), steps=1)
    first = model.blocks[0]
    first.up = Adapted(first.up)
    removed = model.blocks[1].up
    model.blocks[1].up = removed.base_layer
    removed.zero_grad()
    model(ids()).square().mean().backward()
    assert first.up.up.weight.grad is not None
    assert removed.up.weight.grad is None


@pytest.mark.slow
def test_they_stay_plain_where_the_model_is_undispatched_and_become_part_of_blocks_where_it_is_prepared() -> None:
    model = adapted(dispatch_model(stack().train(), {"": "cpu"}, main_device=at(0)))
    losses = trained(model, ids())
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert prepare_training(model, parameters)
    assert [p for p in model.parameters() if p.requires_grad] == parameters
    trained(model, ids())
    plain = undispatch(model)
    assert {type(p) for p in plain.parameters()} == {nn.Parameter}
    assert {p.device.type for p in plain.parameters()} == {"cpu"}
    resident = adapted(stack().train().to(at(0)))
    assert losses == trained(resident, ids().to(at(0)))
    trained(resident, ids().to(at(0)))
    assert torch.equal(plain.head.up.weight, resident.head.up.weight.cpu())


@pytest.mark.slow  # imports peft
@alike("rest", ["cpu", 0], first=1)
def test_adapters_of_peft(rest: object) -> None:
    peft = pytest.importorskip("peft")

    def losses(model: nn.Module, x: torch.Tensor) -> list[float]:
        torch.manual_seed(0)
        targets = ["embed_tokens", "q_proj", "down_proj", "lm_head"]
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
        found = []
        for _ in range(3):
            loss = adapted(input_ids=x, labels=x, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    places = {"": rest, "model.layers.0": "cpu"}
    model = dispatch_model(llama(2).train(), places, main_device=at(0))
    assert losses(model, TOKENS) == pytest.approx(losses(llama(2).train().to(at(0)), TOKENS.to(at(0))), rel=1e-6)


def test_additions_are_looked_for_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    ready = Additions._ready

    def noting(self: Additions, module: nn.Module, device: torch.device) -> list[HostTensor]:
        locked.append(self._lock.locked())
        return ready(self, module, device)

    monkeypatch.setattr(Additions, "_ready", noting)
    model = dispatch_model(stack(), LAST_IS_OFFLOADED, main_device=at(0))
    adapted(model)
    model(ids().to(at(0)))
    assert locked
    assert all(locked)
