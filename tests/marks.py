"""Marks shared by parametrised tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Container, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def slow_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter (tuples of several), those that are not `quick` marked slow."""
    several = ((value, value if isinstance(value, tuple) else (value,)) for value in values)
    return [value if value in quick else pytest.param(*each, marks=pytest.mark.slow) for value, each in several]


def needs(package: str) -> pytest.MarkDecorator:
    """Return the mark of tests that need an optional package. Unlike `importorskip` it does not import the package."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations of the values of several parameters, such that any two values of any two of them meet."""

    def pairs_in(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(combination), 2))

    possible = list(product(*(range(len(values)) for values in factors)))
    missing = set().union(*map(pairs_in, possible))
    chosen = []
    while missing:
        best = max(possible, key=lambda combination: len(missing & pairs_in(combination)))
        missing -= pairs_in(best)
        chosen.append(tuple(values[index] for values, index in zip(factors, best, strict=True)))
    return chosen
