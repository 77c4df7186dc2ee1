"""Options: values from files and flags in the types they are declared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from bigmodel.errors import LaunchError
from bigmodel.launch.options import as_text, coerce, nearest, option, options_of


@dataclass
class Example:
    count: int | None = option(None, "How many.")
    rate: float = option(0.5, "How fast.", env="RATE")
    name: str | None = option(None, "What.", choices=("no", "Fast"))
    on: bool | None = option(None, "Whether.", switch=True)
    plain: int = 3


def test_fields_with_help_are_options() -> None:
    found = options_of(Example)
    assert {name: item.kind for name, item in found.items()} == {
        "count": "int",
        "rate": "float",
        "name": "str",
        "on": "bool",
    }
    assert (found["rate"].environment, found["rate"].default, found["on"].switch) == ("RATE", 0.5, True)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("count", "7", 7),
        ("count", 7, 7),
        ("count", 7.0, 7),
        ("count", None, None),
        ("count", "none", None),
        ("rate", "1e-3", 1e-3),
        ("rate", 2, 2.0),
        ("name", "FAST", "Fast"),
        ("name", False, "no"),
        ("on", "yes", True),
        ("on", "No", False),
        ("on", True, True),
        ("on", 0, False),
    ],
)
def test_values_are_read_as_they_are_meant(name: str, given: Any, expected: Any) -> None:
    found = coerce(options_of(Example)[name], given, "here")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("count", "two", "here: count is 'two'; it must be a whole number"),
        ("count", 1.5, "here: count is 1.5; it must be a whole number"),
        ("count", True, "here: count is True; it must be a whole number"),
        ("rate", "fast", "here: rate is 'fast'; it must be a number"),
        ("name", "slow", "here: name is 'slow', which is not one of: no, Fast"),
        ("name", {"a": 1}, "it must be a text"),
        ("on", "maybe", "here: on is 'maybe'; it must be true or false"),
    ],
)
def test_other_values_are_refused_by_name(name: str, given: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        coerce(options_of(Example)[name], given, "here")


def test_the_nearest_name_is_offered_only_when_it_is_near() -> None:
    assert nearest("num_proceses", ["num_processes", "debug"]) == " Did you mean 'num_processes'?"
    assert nearest("xyz", ["num_processes"]) == ""


def test_the_environment_carries_booleans_in_lower_case() -> None:
    assert [as_text(value) for value in (True, False, 3, "FULL")] == ["true", "false", "3", "FULL"]
