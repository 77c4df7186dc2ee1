"""Marks shared by parametrised tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter (tuples of several), those that are not `quick` marked slow."""
    several = ((value, value if isinstance(value, tuple) else (value,)) for value in values)
    return [value if value in quick else pytest.param(*each, marks=pytest.mark.slow) for value, each in several]


def needs(package: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need an optional package. Unlike `importorskip` it does not import the package."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")
