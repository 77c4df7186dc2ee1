"""States of the training side begin anew in each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bigmodel.devices import virtual
from bigmodel.train import AcceleratorState, GradientState, PartialState

# PyTorch's autograd learns of device types when it first runs: the virtual one has to be there by then.
virtual.enable(count=1)
virtual.disable()


@pytest.fixture(autouse=True)
def _new_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    monkeypatch.undo()  # before the states it may have changed are forgotten
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
