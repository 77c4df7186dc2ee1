from __future__ import annotations

import torch
from torch import nn

from bigmodel.profile import find_tied_parameters, retie_parameters

from ..models import Stack, on_meta


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
