"""Modules as a tree: repeated blocks, compiling them in place, and children before parents."""

from __future__ import annotations

import pytest
from torch import nn

from bigmodel.compat import regions


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(1, 1))
        self.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.mixed = nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])


def test_a_list_of_modules_of_one_class_is_repeated() -> None:
    model = Model()
    assert regions.is_repeated_blocks(model.layers)
    assert regions.has_repeated_blocks(model)
    for other in (model, model.mixed, model.enter, nn.ModuleList()):
        assert not regions.is_repeated_blocks(other)
    assert not regions.has_repeated_blocks(model.enter)
    assert not regions.has_repeated_blocks(nn.ReLU())


@pytest.mark.parametrize("compile_regions", [regions.compile_regions_deepspeed, regions.compile_regions_fsdp2])
def test_blocks_and_what_holds_none_are_compiled(compile_regions) -> None:  # type: ignore[no-untyped-def]
    model = Model()
    compile_regions(model, backend="eager")
    compiled = {name for name, part in model.named_modules() if part._compiled_call_impl is not None}
    assert compiled == {"enter", "layers.0", "layers.1", "mixed"}


def test_children_come_before_what_holds_them() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sigmoid())
    found = regions.get_module_children_bottom_up(model, return_fqns=True)
    assert [name for name, _ in found] == ["0.0", "0.1", "0", "1", ""]
    assert regions.get_module_children_bottom_up(model) == [module for _, module in found]
    assert found[-1][1] is model
