"""Cutting the arguments of a call by their rows, and joining what the calls return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from bigmodel.devices.rows import cut_rows, join_rows, row_count


def refusal(value: Any) -> ValueError:
    return ValueError(f"not joined: {type(value).__name__}")


def test_rows_are_those_of_the_first_tensor_that_has_any() -> None:
    assert row_count(((torch.tensor(3.0), torch.zeros(4, 2)), {"mask": torch.zeros(7)})) == 4
    assert row_count(((), {"flag": True, "name": "a", "none": None})) is None


def test_an_object_of_unknown_rows_has_a_call_computed_whole() -> None:
    assert row_count(((torch.zeros(4, 2),), {"past_key_values": DynamicCache()})) is None


def test_only_tensors_of_as_many_rows_are_cut() -> None:
    arguments = ((torch.arange(12).view(6, 2),), {"mask": [torch.arange(6)], "bias": torch.zeros(1, 6), "k": 2})
    (ids,), named = cut_rows(arguments, 6, 2, 4)
    assert ids.tolist() == [[4, 5], [6, 7]]
    assert named["mask"][0].tolist() == [2, 3]
    assert named["bias"].shape == (1, 6)
    assert named["k"] == 2


def test_containers_are_joined_and_what_is_equal_stays() -> None:
    parts = [
        CausalLMOutputWithPast(logits=torch.full((rows, 2), float(rows)), hidden_states=(torch.ones(rows),))
        for rows in (2, 1)
    ]
    joined = join_rows(parts, [2, 1], refusal)
    assert isinstance(joined, CausalLMOutputWithPast)
    assert joined.logits is not None
    assert joined.logits.tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]]
    assert joined.hidden_states is not None
    assert joined.hidden_states[0].shape == (3,)
    assert joined.loss is None
    shared = torch.tensor(5.0)
    assert join_rows([{"scale": shared.clone(), "n": 3}] * 2, [2, 1], refusal) == {"scale": shared, "n": 3}


def test_caches_are_joined_by_their_tensors() -> None:
    parts = []
    for rows in (2, 1):
        cache = DynamicCache()
        cache.update(torch.full((rows, 1, 3, 2), 1.0 * rows), torch.full((rows, 1, 3, 2), -1.0 * rows), 0)
        parts.append(cache)
    joined = join_rows(parts, [2, 1], refusal)
    assert joined.get_seq_length() == 3
    assert joined.layers[0].keys[:, 0, 0, 0].tolist() == [2.0, 2.0, 1.0]
    assert joined.layers[0].values[:, 0, 0, 0].tolist() == [-2.0, -2.0, -1.0]
    assert parts[0].layers[0].keys.shape[0] == 2  # the parts are as they were


def test_every_tensor_is_announced_before_it_is_read() -> None:
    parts = [torch.ones(2), torch.ones(1)]
    seen: list[torch.Tensor] = []
    join_rows([{"x": each} for each in parts], [2, 1], refusal, seen.append)
    assert [id(each) for each in seen] == [id(each) for each in parts]


@dataclass
class Counted:
    count: int


@pytest.mark.parametrize(
    "parts",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.ones(3, 2), torch.ones(2, 2)],
        [{"a": 1}, {"a": 2}],
        [{"a": 1}, {"b": 1, "c": 2}],
        [Counted(1), Counted(2)],
        ["one", "other"],
    ],
    ids=["losses", "other rows", "numbers", "keys", "fields", "texts"],
)
def test_what_has_no_rows_and_differs_is_refused(parts: list[Any]) -> None:
    with pytest.raises(ValueError, match="not joined"):
        join_rows(parts, [2, 1], refusal)
