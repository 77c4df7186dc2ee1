"""What is not said is left to the plan."""

from __future__ import annotations

import dataclasses

import pytest

from bigmodel.server.engine import EngineOptions


def test_what_depends_on_the_plan_and_the_machine_is_not_said() -> None:
    options = EngineOptions()
    assert (options.max_sequences, options.kv_bytes, options.max_length) == (None, None, None)
    assert (options.row_multiple, options.host_linear) == ("auto", "auto")


def test_options_do_not_change_under_an_engine() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().max_queue = 1  # type: ignore[misc]
