from __future__ import annotations

import torch
from torch import nn

from bigmodel.devices import virtual
from bigmodel.profile import named_tensors, storage_key, tensor_specs

from ..models import Stack, on_meta


def test_every_name_is_listed_as_in_the_state_dict() -> None:
    model = Stack(tied=True, direct=True)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    persistent = {name for name, _, _, kept in named_tensors(model) if kept}
    assert persistent == set(model.state_dict())
    assert [name for name, _, is_buffer, kept in named_tensors(model) if is_buffer and not kept] == ["scratch"]


def test_tied_names_share_a_storage_number_also_on_meta() -> None:
    specs = {spec.name: spec for spec in tensor_specs(on_meta(Stack, tied=True))}
    assert specs["embed.weight"].storage == specs["head.weight"].storage
    assert specs["embed.weight"].storage != specs["norm.weight"].storage


def test_views_of_different_parts_of_one_storage_are_not_tied() -> None:
    storage = torch.zeros(8)
    assert storage_key(storage[:4]) != storage_key(storage[4:])
    assert storage_key(storage[:4]) == storage_key(storage[:4].view(2, 2))


def test_empty_tensors_are_tied_to_nothing() -> None:
    assert storage_key(torch.empty(0)) != storage_key(torch.empty(0))


def test_tied_tensors_are_found_on_a_virtual_accelerator() -> None:
    virtual.enable(1)
    try:
        tensor = torch.ones(4, device="virtual:0")
        assert storage_key(nn.Parameter(tensor)) == storage_key(tensor.detach())
        assert storage_key(tensor) != storage_key(tensor.clone())
    finally:
        virtual.disable()


def test_loading_casts_parameters_and_leaves_buffers_and_integers() -> None:
    model = nn.BatchNorm1d(4)
    sizes = {spec.name: spec.nbytes for spec in tensor_specs(model, "float64")}
    assert sizes == {"weight": 32, "bias": 32, "running_mean": 16, "running_var": 16, "num_batches_tracked": 8}


def test_counting_as_accelerate_does_casts_buffers_and_never_widens() -> None:
    model = nn.BatchNorm1d(4)
    wide = {spec.name: spec.nbytes for spec in tensor_specs(model, "float64", as_loaded=False)}
    narrow = {spec.name: spec.nbytes for spec in tensor_specs(model, "float16", as_loaded=False)}
    assert wide["weight"] == wide["running_mean"] == 16
    assert narrow["weight"] == narrow["running_mean"] == 8


def test_special_dtypes_win_and_odd_bits_are_rounded_up() -> None:
    specs = {spec.name: spec for spec in tensor_specs(nn.Linear(3, 1), "float16", {"weight": "int4"})}
    assert specs["weight"].nbytes == 2
    assert specs["weight"].dtype == "int4"
    assert specs["bias"].nbytes == 2
