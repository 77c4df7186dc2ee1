"""Dispatched models made ready for an optimizer: what must move moves, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.checkpoint import mapped_region, save_model
from bigmodel.devices import free_memory_bytes, memory_allocated, virtual
from bigmodel.dispatch import dispatch_model, is_streamed, load_checkpoint_and_dispatch, prepare_training, undispatch
from bigmodel.errors import DispatchError
from bigmodel.plan import plan_training

from .models import ids, llama, stack
from .streaming.test_gradients import assert_same, gradients

pytestmark = pytest.mark.usefixtures("accelerators")


def on_disk(folder: Path, **options: object) -> nn.Module:
    save_model(stack(), folder)
    return load_checkpoint_and_dispatch(
        stack(seed=1).train(), folder, device_map={"": "disk"}, main_device="virtual:0", **options
    )


def step(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.slow
def test_trained_weights_on_disk_become_private_copies(tmp_path: Path) -> None:
    model = on_disk(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    parameters = dict(model.named_parameters())
    assert prepare_training(model, model.parameters())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert all(mapped_region(p) is None for p in model.parameters())
    assert model.hf_device_map == {"": "cpu"}
    assert model.head.weight is model.embed.weight
    step(model, ids())
    resident = stack().train().to("virtual:0")
    step(resident, ids().to("virtual:0"))
    assert_same(gradients(model), gradients(resident))
    for (name, p), q in zip(model.named_parameters(), resident.parameters()):
        assert torch.equal(p, q.cpu()), name
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_frozen_weights_stay_on_disk(tmp_path: Path) -> None:
    model = on_disk(tmp_path).requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    assert prepare_training(model, model.blocks[1].parameters())
    assert model.hf_device_map[""] == "disk"
    lying = {name for name, p in model.named_parameters() if mapped_region(p) is not None}
    assert lying == {name for name, _ in model.named_parameters() if not name.startswith("blocks.1")}


def test_a_model_that_can_be_trained_where_it_lies_is_left_alone() -> None:
    model = dispatch_model(stack(), {"": 0, "blocks.2": "cpu"})
    attached = model.forward
    assert not prepare_training(model, model.parameters())
    assert model.forward is attached
    assert not prepare_training(stack(), stack().parameters())


def test_weights_leave_an_accelerator_that_has_no_room_for_their_gradients() -> None:
    virtual.enable(count=1, capacity="96KiB")
    model = dispatch_model(stack(width=32, depth=2), {"": 0, "blocks.1": "cpu"})
    weights = sum(p.nbytes for p in model.blocks[0].parameters())
    assert weights * 4 < 96 * 1024 < 16 * weights
    assert prepare_training(model, model.parameters())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    step(model, ids())
    resident = stack(width=32, depth=2)
    step(resident, ids())
    for p, q in zip(model.parameters(), resident.parameters()):
        torch.testing.assert_close(p, q)


def test_a_budget_counts_as_the_end_of_the_memory() -> None:
    budgets = {0: "70KiB", "cpu": "1GiB"}
    model = dispatch_model(stack(width=32), "auto", max_memory=budgets, sample_inputs=ids())
    held = {name for name, p in model.named_parameters() if p.device.type == "virtual"}
    assert held
    assert prepare_training(model, model.parameters())
    assert not {name for name, p in model.named_parameters() if p.device.type == "virtual"}
    assert memory_allocated(0) <= 70 * 1024


def test_too_little_host_memory_is_an_error_that_says_how_much(tmp_path: Path) -> None:
    weights = sum(p.nbytes for p in stack().parameters())
    model = on_disk(tmp_path, max_memory={0: "1GiB", "cpu": weights, "disk": "1GiB"})
    with pytest.raises(DispatchError, match=r"trained parameter lies on disk: scale and \d+ more.*are needed"):
        prepare_training(model, model.parameters())
    assert is_streamed(model)
    assert all(mapped_region(p) is not None for p in model.parameters())


class Adapted(nn.Module):
    """A layer in an adapter, named as peft names them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.up = nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(x) * self.scale


def adapt(model: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, {"": "disk", "blocks.1.up": "cpu", "head": "cpu"}])
def test_modules_added_since_get_their_place(tmp_path: Path, device_map: dict[str, object]) -> None:
    save_model(stack(), tmp_path)
    model = load_checkpoint_and_dispatch(stack(1).train(), tmp_path, device_map=device_map, main_device="virtual:0")
    adapt(model).requires_grad_(False)
    adapters = [block.up.up.weight.requires_grad_() for block in model.blocks]
    assert prepare_training(model, adapters)
    model(ids()).square().sum().backward()
    resident = adapt(stack()).requires_grad_(False).train()
    expected = [block.up.up.weight.requires_grad_() for block in resident.blocks]
    resident(ids()).square().sum().backward()
    for found, right in zip(adapters, expected):
        torch.testing.assert_close(found.grad, right.grad)
    assert mapped_region(model.blocks[2].down.weight) is None or "disk" in device_map.values()
    undispatch(model)
    assert not is_streamed(model)


def test_a_map_that_names_a_wrapped_layer_s_weight_still_leads_to_it() -> None:
    device_map = {"": 0, "blocks.0.up.weight": "cpu", "blocks.0.up.bias": "cpu"}
    model = adapt(dispatch_model(stack(), device_map))
    assert prepare_training(model, [])
    assert model.hf_device_map["blocks.0.up.base_layer.weight"] == "cpu"
    assert model.blocks[0].up.base_layer.weight.device.type == "cpu"
    assert model(ids()).shape == (3, 11)


@pytest.mark.slow
def test_a_plan_of_training_is_kept_to() -> None:
    """By rule of thumb, half of what is free would not do for what training keeps; the plan has counted it."""
    model = llama(layers=4)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    virtual.enable(count=1, capacity=8 * weights)
    plan = plan_training(model, {0: 8 * weights, "cpu": 2**30}, 1, 16)
    assert set(plan.device_map.values()) == {0}
    dispatch_model(model.train(), plan)
    with torch.no_grad():
        taken = torch.empty(free_memory_bytes("virtual:0") - 5 * weights, dtype=torch.uint8, device="virtual:0")
    assert not prepare_training(model, model.parameters())
    assert {parameter.device.type for parameter in model.parameters()} == {"virtual"}
    del taken


@pytest.mark.parametrize("places", [{"": 0, "head": 1}, {"": 0, "embed": 1}, {"": 0, "embed": "cpu", "head": 1}])
def test_tied_weights_on_two_devices_are_not_trained_apart_without_being_prepared(places: dict[str, Any]) -> None:
    model = dispatch_model(stack().train(), places)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    model(ids()).square().mean().backward()
    with pytest.raises(DispatchError, match=r"embed.weight and head.weight were one tied weight.*trained apart"):
        optimizer.step()
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.named_parameters())
    for part in (model.embed, model.head):
        part.requires_grad_(False)
        part.zero_grad()
    optimizer.step()
    undispatch(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_tied_weights_on_two_devices_are_not_trained_apart() -> None:
    model = dispatch_model(stack().train(), {"": 0, "head": 1})
    with pytest.raises(DispatchError, match=r"embed.weight and head.weight were one tied weight.*trained apart"):
        prepare_training(model, model.parameters())
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    prepare_training(model, model.blocks.parameters())


BUILT_BEFORE: list[dict[str, Any]] = [
    {"": 0},
    {"": "disk", "head": "disk"},
    {"": 0, "blocks.1": "cpu"},
    {"": 0, "blocks.0": 1, "blocks.1": "disk"},
    {"": 0, "embed": "cpu", "blocks": 1},
]


@pytest.mark.parametrize("device_map", BUILT_BEFORE, ids=str)
def test_an_optimizer_that_was_built_before_trains_what_was_dispatched_and_undispatched(
    device_map: dict[str, Any], tmp_path: Path
) -> None:
    model, plain = stack().train(), stack().train()
    parameters = dict(model.named_parameters())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path)
    for dispatched in (True, False):
        if not dispatched:
            undispatch(model, "cpu")
        for trained, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            trained(ids().to(next(trained.buffers()).device)).square().sum().backward()
            optimizer.step()
        assert all(p is parameters[name] for name, p in model.named_parameters())
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p.cpu(), q, rtol=1e-4, atol=1e-5), name


def test_a_weight_that_was_tied_is_not_trained_by_an_optimizer_that_was_built_before() -> None:
    model = stack().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dispatch_model(model, {"": 0, "embed": 1})
    model(ids()).square().sum().backward()
    with pytest.raises(DispatchError, match="were one tied weight"):
        optimizer.step()


def test_hooks_of_a_weight_that_was_moved_are_removed_by_their_handles() -> None:
    seen: list[str] = []
    model = nn.Linear(4, 4)
    handles = [
        model.weight.register_hook(lambda _: seen.append("gradient")),
        model.weight.register_post_accumulate_grad_hook(lambda _: seen.append("added")),
    ]
    dispatch_model(model, {"": 0}, force_hooks=True)
    model(torch.ones(2, 4)).sum().backward()
    assert seen == ["gradient", "added"]
    for handle in handles:
        handle.remove()
    model(torch.ones(2, 4)).sum().backward()
    assert seen == ["gradient", "added"]


@pytest.mark.parametrize("device_map", [{"": 0}, {"": "disk"}], ids=str)
def test_a_weight_with_weak_references_is_trained_too(device_map: dict[str, Any], tmp_path: Path) -> None:
    model, x = nn.GRU(4, 4), torch.ones(3, 4)
    before = model(x)[0].detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dispatch_model(model, device_map, main_device=0, offload_dir=tmp_path, force_hooks=True)
    for undo in (False, True):
        if undo:
            undispatch(model, "cpu")
        optimizer.zero_grad()
        model(x)[0].sum().backward()
        optimizer.step()
        after = model(x)[0].detach()
        assert not torch.equal(after, before)
        before = after
