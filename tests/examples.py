"""How many examples property tests take, and how many kinds tests of alike kinds do in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings

FAST = 25
"""Examples of a property test in every run."""

THOROUGH = 300
"""Examples of a property test under the profile "thorough"."""


def register_profiles() -> None:
    """Register the profiles of hypothesis: "fast", which is loaded, "thorough" and "shrink".

    A failing example is printed as it was found: making it smaller takes minutes, which "shrink" does. An example may
    take as long as it likes: on a busy machine a limit would fail.
    """
    as_found = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
    settings.register_profile("shrink", settings.get_profile("default"), print_blob=True, deadline=None)
    settings.register_profile("thorough", max_examples=THOROUGH, deadline=None, phases=as_found)
    settings.register_profile("fast", max_examples=FAST, deadline=None, phases=as_found)
    settings.load_profile("fast")


def few(examples: int) -> int:
    """Return the number of examples of a test of which each takes long: in proportion to the others'."""
    return max(examples, examples * settings().max_examples // FAST)


def every(moments: int) -> int:
    """Return the step in which a test goes through many moments: `moments`, or 1 under "thorough"."""
    return 1 if settings().max_examples >= THOROUGH else moments


def some(cases: Sequence[Any], first: int) -> list[Any]:
    """Return the values of a parameter of a test of which each takes long: the `first` ones, all under "thorough"."""
    return list(cases if settings().max_examples >= THOROUGH else cases[:first])


def alike(
    names: str | tuple[str, ...],
    cases: Sequence[Any],
    first: int,
    ids: Callable[[Any], str] | Sequence[str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test over alike kinds of which each takes long: the `first` ones are in every run, the others long.

    Args:
        names: the parameters, as `pytest.mark.parametrize` takes them.
        cases: their values, the most telling first.
        first: how many of them are in every run.
        ids: as `pytest.mark.parametrize` takes them.
    """
    several = not isinstance(names, str) or "," in names
    marks = (pytest.mark.slow, pytest.mark.long)
    long = [_with_marks(case if several else (case,), marks) for case in cases[first:]]
    return pytest.mark.parametrize(names, [*cases[:first], *long], ids=ids)


_PARAM = type(pytest.param())


def _with_marks(values: Any, marks: Sequence[pytest.MarkDecorator]) -> Any:
    if len(values) == 1 and isinstance(values[0], _PARAM):
        values = values[0]
    if isinstance(values, _PARAM):
        return pytest.param(*values.values, marks=[*values.marks, *marks], id=values.id)
    return pytest.param(*values, marks=marks)
