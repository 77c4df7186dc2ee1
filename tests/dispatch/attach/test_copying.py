"""A deep copy of a dispatched model is a second one, dispatched alike."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from bigmodel.checkpoint import mapped_region, save_model
from bigmodel.devices import memory_allocated
from bigmodel.dispatch import dispatch_model, get_plan, load_checkpoint_and_dispatch, undispatch
from bigmodel.errors import DispatchError

from ...accelerators import at, exact, two
from ..models import ids, llama, stack

pytestmark = pytest.mark.usefixtures("every_accelerator")

MAPS: list[Any] = [
    {"": 0},
    {"": "cpu"},
    {"": "disk"},
    {"": 0, "blocks.1": "cpu", "blocks.2": "disk"},
    pytest.param({"": 0, "blocks.1": "cpu", "blocks.2": "disk", "blocks.3": 1}, marks=two),
]


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids().to(at(0))).cpu()
    return found


@pytest.mark.parametrize("device_map", MAPS)
def test_a_copy_computes_the_same_bits_where_the_model_does(device_map: dict[str, Any], tmp_path: Path) -> None:
    model = dispatch_model(stack(), device_map, main_device=at(0), offload_dir=tmp_path)
    expected = outputs(model)
    copied = copy.deepcopy(model)
    assert copied.hf_device_map == model.hf_device_map
    assert get_plan(copied) is get_plan(model)
    assert [p.device for p in copied.parameters()] == [p.device for p in model.parameters()]
    assert torch.equal(outputs(copied), expected)
    assert torch.equal(outputs(undispatch(copied)), expected) if device_map == {"": 0} else undispatch(copied)
    assert torch.equal(outputs(model), expected)


@pytest.mark.parametrize("device_map", MAPS)
def test_what_is_written_to_a_copy_is_not_in_the_model(device_map: dict[str, Any], tmp_path: Path) -> None:
    model = dispatch_model(stack(), device_map, main_device=at(0), offload_dir=tmp_path)
    expected = outputs(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    assert not torch.equal(outputs(copied), expected)
    assert torch.equal(outputs(model), expected)


def with_a_checkpoint(folder: Path) -> nn.Module:
    """A model of pages of their own and shared ones, on disk."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    save_model(model, folder)
    return load_checkpoint_and_dispatch(model, folder, {"": "disk"}, main_device=at(0))


def test_weights_of_a_checkpoint_are_mapped_again_and_those_that_were_written_to_are_copied(tmp_path: Path) -> None:
    model = with_a_checkpoint(tmp_path)
    with torch.no_grad():
        model[0].weight[32].add_(1)
    copied = copy.deepcopy(model)
    assert [mapped_region(layer.weight) is None for layer in copied] == [True, False, False]
    assert all(torch.equal(one, other) for one, other in zip(copied.parameters(), model.parameters()))


def test_weights_of_a_checkpoint_that_is_gone_are_copied_to_memory(tmp_path: Path) -> None:
    model = with_a_checkpoint(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    copied = copy.deepcopy(model)
    assert all(mapped_region(parameter) is None for parameter in copied.parameters())
    assert all(torch.equal(one, other) for one, other in zip(copied.parameters(), model.parameters()))


@pytest.mark.slow
def test_weights_in_an_offload_folder_are_written_once_more(tmp_path: Path) -> None:
    model = dispatch_model(stack(), {"": "disk"}, main_device=at(0), offload_dir=tmp_path)
    expected = outputs(model)
    copied = copy.deepcopy(model)
    assert all(mapped_region(parameter) is not None for parameter in copied.parameters())
    assert torch.equal(outputs(copied), expected)


@exact
def test_a_copy_takes_the_memory_of_the_accelerator_once_more() -> None:
    before = memory_allocated(0)
    model = dispatch_model(stack(), {"": 0, "blocks.1": "cpu"}, main_device=at(0))
    taken = memory_allocated(0) - before
    copied = copy.deepcopy(model)
    assert memory_allocated(0) - before == 2 * taken
    del copied
    assert memory_allocated(0) - before == taken


def test_tied_weights_are_tied_in_the_copy() -> None:
    model = dispatch_model(llama(tie_word_embeddings=True), {"": 0, "model.layers.1": "cpu"}, main_device=at(0))
    copied = copy.deepcopy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight is not model.lm_head.weight


def test_a_mean_of_weights_is_kept_in_a_copy() -> None:
    model, plain = dispatch_model(stack(), {"": "cpu"}, main_device=at(0)), stack()
    means = [AveragedModel(each) for each in (model, plain)]
    with torch.no_grad():
        for each, mean in zip((model, plain), means):
            for step in range(2):
                for parameter in each.parameters():
                    parameter.add_(step)
                mean.update_parameters(each)
    assert all(torch.equal(*both) for both in zip(*(mean.parameters() for mean in means)))
    assert torch.equal(outputs(means[0]), outputs(means[1].to(at(0))))


def test_own_forwards_hooks_and_attributes_are_copied() -> None:
    model = stack()
    model.blocks[0].forward = model.blocks[0].forward  # as libraries do that wrap forwards
    model.note = {"kept": [1, 2]}
    seen: list[int] = []
    model.blocks[1].register_forward_hook(lambda module, *_: seen.append(id(module)))
    copied = copy.deepcopy(dispatch_model(model, {"": "cpu"}, main_device=at(0)))
    outputs(copied)
    assert seen == [id(copied.blocks[1])]
    assert copied.note == model.note
    assert copied.note is not model.note
    undispatch(copied)
    assert copied.blocks[0].forward.__self__ is copied.blocks[0]


def test_a_model_is_not_copied_while_it_runs() -> None:
    model = stack()
    model.blocks[0].register_forward_hook(lambda *_: copy.deepcopy(model))
    dispatch_model(model, {"": "cpu"}, main_device=at(0))
    with pytest.raises(DispatchError, match="running"):
        outputs(model)
