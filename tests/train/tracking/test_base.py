"""Your own trackers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bigmodel.errors import TrainError
from bigmodel.train.state.partial import PartialState
from bigmodel.train.tracking import GeneralTracker
from bigmodel.train.tracking.base import as_number, flat, is_number, table_rows
from tests.train.tracking.remembering import Remembering


def test_other_processes_do_not_log(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Remembering()
    monkeypatch.setitem(PartialState().__dict__, "process_index", 1)
    tracker.log({"loss": 1.0})
    assert tracker.seen == []


def test_a_tracker_may_log_on_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Everywhere(Remembering):
        main_process_only = False

    tracker = Everywhere()
    monkeypatch.setitem(PartialState().__dict__, "process_index", 1)
    tracker.log({"loss": 1.0})
    assert len(tracker.seen) == 1


def test_the_error_of_an_incomplete_tracker_names_missing_attributes() -> None:
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(TrainError, match="Incomplete lacks requires_logging_directory, tracker"):
        Incomplete()


@pytest.mark.parametrize("value", [1, 2.5, torch.tensor(3.0), np.float32(4), np.array([5]), torch.ones(1, 1)])
def test_numbers_are_numbers_in_any_wrapping(value: Any) -> None:
    assert is_number(value)
    assert isinstance(as_number(value), (int, float))


@pytest.mark.parametrize("value", ["text", torch.ones(2), np.zeros(3), None, {"a": 1}])
def test_other_values_are_not_numbers(value: Any) -> None:
    assert not is_number(value)


def test_nested_values_become_names_with_slashes() -> None:
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}


def test_tables_come_as_columns_and_rows_or_as_a_dataframe() -> None:
    class Frame:
        columns = ("x", "y")

        def to_numpy(self) -> Any:
            return np.array([[1, 2]])

    assert table_rows(["x", "y"], [[1, 2]], None) == (["x", "y"], [[1, 2]])
    assert table_rows(None, None, Frame()) == (["x", "y"], [[1, 2]])
    assert table_rows(None, [[1, 2]], None) == (["0", "1"], [[1, 2]])
    with pytest.raises(TrainError, match="columns and data, or a dataframe"):
        table_rows(None, None, None)
