from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigmodel.profile.shorten import CONTEXT, kind_of, shorten


def test_equal_layers_are_stood_for_by_the_first_few() -> None:
    kept, twins = shorten(["a"] * 10) or (0, ())
    assert kept == CONTEXT + 2
    assert twins == (0, 1, 2, 2, 2, 2, 2, 2, 2, 3)


def test_few_layers_are_not_shortened() -> None:
    assert shorten(["a"] * 4) is None
    assert shorten(list("abcdefgh")) is None


@given(st.lists(st.sampled_from("ab"), max_size=24))
def test_each_layer_is_stood_for_by_one_of_its_kind_in_like_company(kinds: list[str]) -> None:
    found = shorten(kinds)
    if found is None:
        return
    kept, twins = found
    assert kept < len(kinds) == len(twins)
    for index, twin in enumerate(twins):
        assert twin < kept
        window = kinds[max(0, index - CONTEXT) : index + 1]
        assert kinds[max(0, twin - CONTEXT) : twin + 1] == window


def test_kinds_differ_by_shape_class_and_setting_but_not_by_position() -> None:
    class Layer(nn.Module):
        def __init__(self, index: int, width: int = 2, window: int = 0) -> None:
            super().__init__()
            self.layer_idx, self.window = index, window
            self.inner = nn.Linear(width, width)

    assert kind_of(Layer(0)) == kind_of(Layer(1))
    assert kind_of(Layer(0)) != kind_of(Layer(0, width=3))
    assert kind_of(Layer(0)) != kind_of(Layer(0, window=4))
    assert kind_of(Layer(0)) != kind_of(Layer(0).to(torch.float16))
