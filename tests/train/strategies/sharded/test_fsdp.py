"""FSDP2: sharding units; on two CPU processes, the loss curve of one process and bitwise resumption."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.strategies.sharded.fsdp import ignored_parameters, units_of
from bigmodel.train.strategies.sharded.fsdp_plugin import FullyShardedDataParallelPlugin as Plugin
from tests.examples import alike

from ..curve import Block, Model


class Nested(nn.Module):
    _no_split_modules = ("Block", "Absent")

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()
        self.head = nn.Linear(3, 3)


def names(model: nn.Module, plugin: Plugin) -> list[str]:
    of = {id(module): name for name, module in model.named_modules()}
    return [of[id(unit)] for unit in units_of(model, plugin)]


def test_the_blocks_a_model_names_are_units() -> None:
    assert names(Nested(), Plugin()) == ["inner.blocks.2", "inner.blocks.1", "inner.blocks.0"]


def test_without_names_the_repeated_blocks_are_units() -> None:
    assert names(Model(), Plugin()) == ["blocks.2", "blocks.1", "blocks.0"]


def test_inner_units_come_before_outer_ones() -> None:
    plugin = Plugin(transformer_cls_names_to_wrap=["Model", "Block"])
    assert names(Nested(), plugin) == ["inner.blocks.2", "inner.blocks.1", "inner.blocks.0", "inner"]


def test_by_size_a_unit_owns_at_least_so_many_parameters() -> None:
    per_block = sum(p.numel() for p in Block().parameters())
    assert names(Model(), Plugin(auto_wrap_policy="size_based_wrap", min_num_params=per_block)) == [
        "blocks.2",
        "blocks.1",
        "blocks.0",
    ]
    assert names(Model(), Plugin(auto_wrap_policy="size_based_wrap", min_num_params=per_block + 1)) == []


def test_functions_choose_units_in_either_form() -> None:
    assert (
        names(Model(), Plugin(auto_wrap_policy=lambda module: isinstance(module, nn.LayerNorm)))[0] == "blocks.2.norm"
    )

    def old(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return isinstance(module, nn.Linear) and nonwrapped_numel < 100

    assert names(Model(), Plugin(auto_wrap_policy=old)) == ["head"]


def test_no_wrap_means_one_unit() -> None:
    assert names(Model(), Plugin(auto_wrap_policy="no_wrap")) == []


def test_names_that_are_not_there_are_said() -> None:
    with pytest.raises(TrainError, match="Model has no module of class Blocks"):
        units_of(Model(), Plugin(transformer_cls_names_to_wrap=["Blocks"]))
    with pytest.raises(TrainError, match="the blocks of Linear are unknown"):
        units_of(nn.Linear(1, 1), Plugin(auto_wrap_policy="transformer_based_wrap"))


def test_modules_are_ignored_by_pattern_or_by_object() -> None:
    model = Model()
    assert ignored_parameters(model, Plugin(ignored_modules=r"blocks\.\d+\.norm")) == {
        p for block in model.blocks for p in block.norm.parameters()
    }
    assert ignored_parameters(model, Plugin(ignored_modules=[model.head])) == set(model.head.parameters())
    assert ignored_parameters(model, Plugin()) == set()


@pytest.mark.slow
@alike("name", ["fsdp", "fsdp_hybrid", "fsdp_one_file"], first=1)
def test_the_curve_is_that_of_one_process(name: str, check_curve: Callable[[str], None]) -> None:
    check_curve(name)
