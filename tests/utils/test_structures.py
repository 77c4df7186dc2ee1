from __future__ import annotations

import pytest
import torch
from torch import nn

from bigmodel.errors import SizeError
from bigmodel.utils import convert_outputs_to_fp32, structures


def test_a_data_structure_has_shapes_without_values() -> None:
    data = {"a": [torch.zeros(2, 3)], "b": (torch.zeros(1, dtype=torch.int64), "text")}
    structure = structures.get_data_structure(data)
    assert structure["a"] == [structures.TensorInformation(torch.Size([2, 3]), torch.float32)]
    assert structures.is_tensor_information(structure["b"][0])
    assert structures.get_data_structure(structures.initialize_tensors(structure)) == structure


def test_outputs_become_float32() -> None:
    forward = convert_outputs_to_fp32(lambda x: {"logits": x.half(), "ids": x.long()})
    assert {name: value.dtype for name, value in forward(torch.ones(1)).items()} == {
        "logits": torch.float32,
        "ids": torch.int64,
    }


def test_dicts_are_merged_into_each_other() -> None:
    destination = {"a": {"x": 1}, "b": 2}
    assert structures.merge_dicts({"a": {"y": 3}, "b": 4, "c": {"z": 5}}, destination) is destination
    assert destination == {"a": {"x": 1, "y": 3}, "b": 4, "c": {"z": 5}}


def test_names_and_paths() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert structures.recursive_getattr(model, "0.weight") is model[0].weight
    assert structures.get_pretty_name(model) == "Sequential"
    assert structures.get_pretty_name(nn.Sequential.forward) == "Sequential.forward"
    assert structures.ignorant_find_batch_size(["text", torch.zeros(3, 2)]) == 3


def test_sizes_are_read_and_written() -> None:
    assert structures.convert_file_size_to_int("1GiB") == 2**30
    assert structures.convert_bytes(1.5 * 2**30) == "1.5 GB"
    with pytest.raises(SizeError):
        structures.convert_file_size_to_int("many")
