"""Every test here runs as a single process whose state is made anew, in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bigmodel.train.accelerator_state import AcceleratorState
from bigmodel.train.state.gradient import GradientState
from bigmodel.train.state.partial import PartialState


@pytest.fixture(autouse=True)
def single_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState(cpu=True)
    yield
    monkeypatch.undo()  # before the states it may have changed are forgotten
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
