"""The blocks of a model: those it names, else its repeated ones."""

from __future__ import annotations

import pytest
from torch import nn

from bigmodel.errors import TrainError
from bigmodel.train.strategies.sharded.blocks import block_classes, class_names

from ..curve import Model


class Nested(nn.Module):
    _no_split_modules = ("Block", "Absent")

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()


def test_the_blocks_a_model_names_come_before_its_repeated_ones() -> None:
    assert block_classes(Nested()) == {"Block"}
    assert block_classes(Model()) == {"Block"}
    assert block_classes(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == set()


def test_names_that_are_asked_for_are_those_of_the_model() -> None:
    assert class_names(Model(), ["Linear"], must=True) == {"Linear"}
    with pytest.raises(TrainError, match="no module of class Conv1d"):
        class_names(Model(), ["Linear", "Conv1d"], must=False)


def test_unknown_blocks_are_an_error_only_where_they_must_be_known() -> None:
    assert class_names(nn.Linear(1, 1), (), must=False) == set()
    with pytest.raises(TrainError, match="the blocks of Linear are unknown"):
        class_names(nn.Linear(1, 1), (), must=True)
