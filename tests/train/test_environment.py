"""Variables of the launcher, read strictly."""

from __future__ import annotations

import pytest

from bigmodel.errors import TrainError
from bigmodel.train import environment

NAME = "ACCELERATE_SOMETHING"


@pytest.mark.parametrize(("value", "expected"), [("yes", True), ("ON", True), (" 1 ", True), ("0", False), ("", False)])
def test_a_flag_is_said_in_many_ways(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv(NAME, value)
    assert environment.flag(NAME, default=not expected) is expected


def test_what_is_not_set_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert (environment.flag(NAME, True), environment.integer(NAME, 3), environment.text(NAME, "a")) == (True, 3, "a")
    monkeypatch.setenv(NAME, "")
    assert (environment.integer(NAME, 3), environment.text(NAME, "a")) == (3, "a")


def test_values_that_mean_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "perhaps")
    with pytest.raises(TrainError, match="ACCELERATE_SOMETHING='perhaps' is neither yes nor no"):
        environment.flag(NAME)
    with pytest.raises(TrainError, match="is not a whole number"):
        environment.integer(NAME, 0)
