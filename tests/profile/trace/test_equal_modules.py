from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bigmodel.profile.trace.equal_modules import (
    CONTEXT,
    LayerSample,
    ModuleStructures,
    block_signature,
    model_signature,
    sample_layers,
)


def test_the_first_few_layers_stand_for_equal_ones() -> None:
    count, stand_ins = sample_layers(["a"] * 10) or (0, ())
    assert count == CONTEXT + 2
    assert stand_ins == (0, 1, 2, 2, 2, 2, 2, 2, 2, 3)


def test_a_short_list_of_layers_is_not_sampled() -> None:
    assert sample_layers(["a"] * 4) is None
    assert sample_layers(list("abcdefgh")) is None


@given(st.lists(st.sampled_from("ab"), max_size=24))
def test_each_layer_has_a_stand_in_with_the_same_predecessors(kinds: list[str]) -> None:
    found = sample_layers(kinds)
    if found is None:
        return
    count, stand_ins = found
    assert count < len(kinds) == len(stand_ins)
    for index, stand_in in enumerate(stand_ins):
        assert stand_in < count
        window = kinds[max(0, index - CONTEXT) : index + 1]
        assert kinds[max(0, stand_in - CONTEXT) : stand_in + 1] == window


def test_kinds_differ_by_shape_class_and_setting_but_not_by_position() -> None:
    class Layer(nn.Module):
        def __init__(self, index: int, width: int = 2, window: int = 0) -> None:
            super().__init__()
            self.layer_idx, self.window = index, window
            self.inner = nn.Linear(width, width)

    assert block_signature(Layer(0)) == block_signature(Layer(1))
    assert block_signature(Layer(0)) != block_signature(Layer(0, width=3))
    assert block_signature(Layer(0)) != block_signature(Layer(0, window=4))
    assert block_signature(Layer(0)) != block_signature(Layer(0).to(torch.float16))


def test_models_are_equal_that_differ_in_blocks_that_are_not_run() -> None:
    def model(*widths: int) -> nn.Module:
        return nn.ModuleDict(
            {"head": nn.Linear(2, 2), "blocks": nn.ModuleList(nn.Linear(2, width) for width in widths)}
        )

    counts = {"blocks": 2}
    assert model_signature(model(2, 3), counts) == model_signature(model(2, 3, 4), counts)
    assert model_signature(model(2, 3), counts) != model_signature(model(3, 2), counts)
    assert model_signature(model(2, 3), {}) != model_signature(model(2, 3, 4), {})


def test_units_are_extended_by_the_layers_that_they_stand_for() -> None:
    sample = LayerSample("blocks", (5, 6, 7, 8, 9, 10), 4, (0, 1, 2, 2, 2, 3))
    assert sample.extended({5, 7, 20}) == {5, 7, 8, 9, 20}
    assert sample.extended({8}) == {10}  # the last layer that runs stands for the last of all


class Scaled(nn.Module):
    """A module with a setting, and one of a config."""

    def __init__(self, power: int, config: Any, layer: int = 0) -> None:
        super().__init__()
        self.power, self.config, self.layer_idx = power, config, layer
        self.project = nn.Linear(2, 2)


def test_structures_are_equal_of_modules_with_equal_settings_of_any_layer() -> None:
    config = SimpleNamespace(width=2)
    model = nn.ModuleList([Scaled(1, config, 0), Scaled(1, config, 1), Scaled(2, config), Scaled(1, SimpleNamespace())])
    structures = ModuleStructures(model)
    first, second, other, of_another_config = (structures.of(module).number for module in model)
    assert first == second
    assert len({first, other, of_another_config, None}) == 4


def test_modules_with_hooks_or_with_a_forward_of_their_own_have_no_structure() -> None:
    hooked, replaced = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    vars(replaced)["forward"] = replaced.forward
    model = nn.ModuleList([nn.Sequential(hooked), replaced, nn.Linear(2, 2)])
    structures = ModuleStructures(model)
    assert [structures.of(module).number is None for module in model] == [True, True, False]


def test_a_structure_is_changed_by_an_attribute_within_the_module() -> None:
    module = Scaled(1, None)
    structure = ModuleStructures(module).of(module)
    assert structure.is_unchanged()
    module.project.bias = None
    assert not structure.is_unchanged()


def test_settings_have_a_number_for_each_state_of_the_configs() -> None:
    config = SimpleNamespace(attention="eager")
    structures = ModuleStructures(Scaled(1, config))
    before = structures.settings
    config.attention = "sdpa"
    assert structures.settings != before
    config.attention = "eager"
    assert structures.settings == before
