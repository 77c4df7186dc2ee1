from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.errors import CheckpointMismatchError
from bigmodel.utils import models


class Wrapped(nn.DataParallel[nn.Module]):
    """A wrapper of PyTorch's that needs no process group."""


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.slow
def test_wrappers_and_compilation_are_removed() -> None:
    model = small()
    assert models.extract_model_from_parallel(Wrapped(model)) is model
    compiled: Any = torch.compile(model)
    assert models.is_compiled_module(compiled)
    assert models.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert models.extract_model_from_parallel(compiled) is compiled


def test_wrappers_of_children_are_removed_if_recursive() -> None:
    inner = nn.Linear(2, 2)
    model = nn.Sequential(Wrapped(inner))
    assert models.extract_model_from_parallel(model) is model
    assert model[0] is not inner
    models.extract_model_from_parallel(model, recursive=True)
    assert model[0] is inner


@pytest.mark.slow
def test_kinds_of_models_are_recognised() -> None:
    model = small()
    assert not models.is_compiled_module(model)
    assert not models.has_compiled_regions(model)
    model[0].compile()
    assert models.has_compiled_regions(model)
    assert not models.is_peft_model(model)
    assert not models.model_has_dtensor(model)


def test_tensors_of_a_module_by_name() -> None:
    model = small()
    assert [name for name, _ in models.named_module_tensors(model[0])] == ["weight", "bias"]
    assert list(models.named_module_tensors(model)) == []
    everything = [name for name, _ in models.named_module_tensors(model, recurse=True)]
    assert everything == [*dict(model.named_parameters()), *dict(model.named_buffers())]
    model[0].register_buffer("passing", torch.zeros(1), persistent=False)
    kept = [name for name, _ in models.named_module_tensors(model[0], remove_non_persistent=True)]
    assert kept == ["weight", "bias"]


def test_a_tensor_is_replaced_and_moved() -> None:
    with torch.device("meta"):
        model = small()
    models.set_module_tensor_to_device(model, "0.weight", "cpu", torch.ones(2, 2), dtype=torch.bfloat16)
    models.set_module_tensor_to_device(model, "1.running_mean", "cpu", torch.ones(2))
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].weight.requires_grad
    assert dict(model.named_buffers())["1.running_mean"].tolist() == [1, 1]
    for name, value, message in (
        ("0.bias", None, "0.bias is on the meta device"),
        (
            "0.bias",
            torch.ones(3),
            r"tensor of shape torch.Size\(\[3\]\) in \"bias\" \(which has shape torch.Size\(\[2\]\)",
        ),
        ("0.other", None, "no parameter or buffer '0.other'"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            models.set_module_tensor_to_device(model, name, "cpu", value)


def test_views_share_their_storage() -> None:
    base = torch.zeros(4)
    assert models.id_tensor_storage(base) == models.id_tensor_storage(base[2:])
    assert models.id_tensor_storage(base) != models.id_tensor_storage(base.clone())
    models.wait_for_everyone()
