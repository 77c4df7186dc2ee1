from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.devices import virtual
from bigmodel.errors import PlanError
from bigmodel.profile import find_tied_parameters, named_tensors, retie_parameters, storage_key, tensor_specs
from bigmodel.profile.model.tensors import (
    CustomDtype,
    dtype_byte_size,
    normalize_dtype,
    normalize_dtypes,
    planned_dtype,
    torch_dtype,
)

from ..models import Stack, on_meta


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("float16", torch.float16),
        ("torch.bfloat16", torch.bfloat16),
        (torch.int8, torch.int8),
        ("int4", CustomDtype.INT4),
        (CustomDtype.FP8, CustomDtype.FP8),
    ],
)
def test_names_and_dtypes_mean_the_same(given: object, meant: object) -> None:
    assert normalize_dtype(given) is meant


@pytest.mark.parametrize("name", ["float17", "nn", "Tensor"])
def test_a_name_that_is_no_dtype_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        normalize_dtype(name)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float64", 8), ("float32", 4), ("bfloat16", 2), ("fp8", 1), ("bool", 1), ("int4", 0.5), ("int2", 0.25)],
)
def test_byte_sizes(dtype: str, size: float) -> None:
    assert dtype_byte_size(dtype) == size


def test_only_floating_point_tensors_are_cast() -> None:
    assert planned_dtype(torch.float32, torch.float16) == torch.float16
    assert planned_dtype(torch.int64, torch.float16) == torch.int64
    assert planned_dtype(torch.float32, None) == torch.float32


def test_weights_are_loaded_as_a_dtype_that_torch_has() -> None:
    assert torch_dtype("torch.float16") == torch_dtype(torch.float16) == torch.float16
    for dtype in ("int4", CustomDtype.FP8, "float99", "", None, 16):
        with pytest.raises(PlanError, match="dtype"):
            torch_dtype(dtype)  # type: ignore[arg-type]


def test_dtypes_by_name_are_a_mapping_of_names() -> None:
    assert normalize_dtypes(None) == {}
    assert normalize_dtypes({"lm_head.weight": "int4"}) == {"lm_head.weight": CustomDtype.INT4}
    for given in ("int4", {3: "int4"}, [("lm_head.weight", "int4")]):
        with pytest.raises(PlanError, match="special_dtypes"):
            normalize_dtypes(given)  # type: ignore[arg-type]


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


def test_special_dtypes_take_precedence_and_odd_bits_are_rounded_up() -> None:
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
