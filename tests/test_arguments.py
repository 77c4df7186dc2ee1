from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigmodel.arguments import (
    LARGEST,
    check_choice,
    check_flags,
    check_model,
    check_names,
    optional_whole_number,
    shown,
    whole_number,
)
from bigmodel.errors import PlanError


def test_whole_numbers_are_what_counts_and_come_back_as_ints() -> None:
    numbers = [3, LARGEST, torch.tensor([4]).numpy()[0]]
    assert [type(whole_number("count", number)) for number in numbers] == [int, int, int]
    assert (optional_whole_number("count", None), optional_whole_number("count", 0)) == (None, 0)


@pytest.mark.parametrize(
    "value", [True, -1, 0, LARGEST + 1, 10**30, 1.0, float("nan"), "3", None, [3], torch.tensor(3)]
)
def test_anything_else_is_refused_with_what_would_do(value: Any) -> None:
    with pytest.raises(PlanError, match=rf"^count is .*; give a whole number from 1 to {LARGEST}$"):
        whole_number("count", value, least=1)


def test_flags_are_true_or_false() -> None:
    check_flags(one=True, other=False, none=None, number=1)
    for value in ("yes", 2, [], torch.ones(2)):
        with pytest.raises(PlanError, match=r"^one is .*; give True or False$"):
            check_flags(one=value)


def test_a_choice_is_one_of_those_known() -> None:
    check_choice("cache", None, ("dynamic", None))
    for value in ("paged", 3, ["dynamic"]):
        with pytest.raises(PlanError, match=r"^cache is .*; use one of dynamic, None$"):
            check_choice("cache", value, ("dynamic", None))


def test_a_model_is_a_module() -> None:
    check_model(nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"model is a type; give a torch\.nn\.Module"):
        check_model(nn.Linear)


def test_a_mapping_by_name_has_text_for_keys() -> None:
    check_names("device_map", {"": 0})
    with pytest.raises(PlanError, match="device_map is a list"):
        check_names("device_map", [("", 0)])
    with pytest.raises(PlanError, match="device_map has the key 3"):
        check_names("device_map", {3: 0})


def test_a_value_is_shown_as_long_as_it_is_short() -> None:
    assert [shown(value) for value in (3, 1.5, None, "text")] == ["3", "1.5", "None", "'text'"]
    assert shown("x" * 1000) == f"'{'x' * 80}'..."
    assert (shown(10**5000), shown(torch.ones(9))) == ("a number beyond 64 bits", "a Tensor")
