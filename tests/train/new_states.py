"""A fixture: the states of the training side begin anew in each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bigmodel.train import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def new_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train on the CPU, in states that end with the test."""
    _forget()  # also those of tests elsewhere, which may be of devices that are gone
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    monkeypatch.undo()  # before the states it may have changed are forgotten
    _forget()


def _forget() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()
