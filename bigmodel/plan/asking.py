"""How much there is to do in asking for experts: the chosen ones are found, held, and let go of.

It is counted in calls that `dispatch` makes in Python between a router and its experts, all of them being there. What a
call takes, the machine says.
"""

from __future__ import annotations

from ..profile.experts import Choice
from .slots import NEARLY_ALL

OF_MODULE, OF_EXPERT = 310, 23
"""Calls for a module, and for each expert that is chosen."""

OF_NEXT = 28
"""Calls for each expert of the module that follows, where nearly all are wanted and it is seen to ahead."""


def calls_of_asking(choice: Choice) -> float:
    """Return how many calls in Python one module's experts are asked for with."""
    ahead = OF_NEXT * choice.count if choice.wanted >= NEARLY_ALL * choice.count else 0
    return OF_MODULE + OF_EXPERT * choice.wanted + ahead
