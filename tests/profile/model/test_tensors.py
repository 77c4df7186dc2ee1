from __future__ import annotations

import torch
from torch import nn

from bigmodel.devices import virtual
from bigmodel.profile import find_tied_parameters, named_tensors, retie_parameters, storage_key, tensor_specs

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


def test_tied_parameters_are_grouped_and_sorted() -> None:
    assert find_tied_parameters(on_meta(Stack, tied=True)) == [["embed.weight", "head.weight"]]
    assert find_tied_parameters(Stack()) == []


def test_a_shared_module_ties_all_its_parameters() -> None:
    shared = nn.Linear(2, 2)
    assert find_tied_parameters(nn.Sequential(shared, nn.ReLU(), shared)) == [
        ["0.bias", "2.bias"],
        ["0.weight", "2.weight"],
    ]


def test_parameters_over_the_same_memory_are_tied_without_being_one_object() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert find_tied_parameters(model) == [["0.weight", "1.weight"]]


def test_agrees_with_accelerate_on_many_ties() -> None:
    from accelerate.utils import find_tied_parameters as reference

    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(30))
    for index in range(0, 30, 3):
        model[index].weight = model[(index + 7) % 30].weight
    assert find_tied_parameters(model) == sorted(reference(model))


def test_retie_prefers_the_parameter_that_has_a_value() -> None:
    model = Stack(tied=True)
    groups = find_tied_parameters(model)
    value = torch.full_like(model.head.weight, 3.0)
    model.embed.weight = nn.Parameter(value.to("meta"))
    model.head.weight = nn.Parameter(value)
    retie_parameters(model, groups)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight[0, 0] == 3
