"""Which names of attributes code makes as it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from bigmodel.dispatch.placement.computed_names import computes_names


def constant(x: Any) -> Any:
    return getattr(x, "real") + getattr(x.conjugate(), "imag", 0)  # noqa: B009


def constant_with_computed_default(x: Any, y: Any) -> Any:
    return getattr(x, "real", y + x.imag)


def none(x: Any) -> Any:
    return x.real


def formatted(x: Any, y: Any) -> Any:
    return getattr(x, f"w{y}")


def joined(x: Any, y: Any) -> Any:
    return getattr(x, "w" + y, None)


def given(x: Any, y: Any) -> Any:
    return getattr(x, y)


def one_of_two(x: Any, y: Any) -> Any:
    return getattr(x, "real"), getattr(x, y.name, y + 1)  # noqa: B009


def handed_on(x: Any, y: Any) -> Any:
    return functools.reduce(getattr, y, x)


def within(x: Any, y: Any) -> Any:
    return [(lambda each: getattr(x, each))(each) for each in y]


def by_getter(x: Any, y: Any) -> Any:
    return attrgetter(y)(x)


def unpacked(x: Any, y: Any) -> Any:
    return getattr(*x)


@pytest.mark.parametrize("function", [constant, constant_with_computed_default, none])
def test_names_that_stand_in_the_code_are_not_computed(function: Callable[..., Any]) -> None:
    assert not computes_names(function.__code__)


@pytest.mark.parametrize("function", [formatted, joined, given, one_of_two, handed_on, within, by_getter, unpacked])
def test_names_that_are_made_as_code_runs_are(function: Callable[..., Any]) -> None:
    assert computes_names(function.__code__)
