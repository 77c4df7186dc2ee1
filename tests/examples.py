"""How many examples property tests take, and how many kinds tests of alike kinds: all under `thorough`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
