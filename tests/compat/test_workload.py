"""What models of other libraries are planned for."""

from __future__ import annotations

import os

import pytest

from bigmodel.compat.workload import BATCH_SIZE, CONTEXT_LENGTH, set_workload, workload
from bigmodel.errors import PlanError


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (BATCH_SIZE, CONTEXT_LENGTH):
        monkeypatch.setenv(variable, "")


def test_without_variables_it_is_one_sequence_of_the_default_length() -> None:
    assert workload() == (1, None)


def test_what_is_set_is_read_here_and_by_the_processes_that_start_later() -> None:
    set_workload(batch_size=4)
    set_workload(context_length=512)
    assert workload() == (4, 512)
    assert (os.environ["BIGMODEL_BATCH_SIZE"], os.environ["BIGMODEL_CONTEXT_LENGTH"]) == ("4", "512")


@pytest.mark.parametrize("text", ["4k", "0", "-1", "2.5"])
def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(CONTEXT_LENGTH, text)
    with pytest.raises(PlanError, match=f"BIGMODEL_CONTEXT_LENGTH is '{text}'; set it to a whole number"):
        workload()
