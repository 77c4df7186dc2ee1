"""Variants of an assignment in which the host computes some of the experts that are missing in the cache.

A step of generation multiplies an expert by a few rows. The host reads it about as fast as a link transfers it, and
both can be done at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...devices import HOST
from ...profile.trace.events import OUTSIDE, Route
from ...profile.trace.expert_calls import BY_ROWS
from ...profile.trace.work import PRODUCT, Work
from ..memory.assignment import Assignment
from ..result.budgets import Key, is_accelerator
from ..result.expert_split import ExpertSplit
from .cost import CostModel
from .unit_cost import Inputs

PLACES = Inputs(OUTSIDE, 6, 0)
"""The small tensors that name rows and slots of hits, and of arrivals, which else are one tensor."""


def with_split(cost: CostModel, known: Assignment) -> Iterator[Assignment]:
    """Yield the variant of an assignment whose calls of few tokens divide their missing experts; none if none can.

    Budgets are not checked.

    Args:
        cost: predicts seconds.
        known: an assignment that streams experts from host memory one by one.
    """
    if not is_accelerator(known.main) or cost.profile.offload_dtype is not None or not cost.profile.phases:
        return
    calls = [
        (unit, position, route, works)
        for unit, of_unit in cost.units.expert_works[-1].items()
        if known.storage[unit] == HOST and known.execution[unit] == known.main
        for position, (route, works) in of_unit.items()
    ]
    kinds = {(replace(route, position=0), _expert_bytes(cost, unit, position)) for unit, position, route, _ in calls}
    if len(kinds) == 1 and calls[0][2].implementation in BY_ROWS:  # the rates are those of one kind of experts
        yield replace(known, expert_split=_rates(cost, *calls[0], known.main))


def _rates(cost: CostModel, unit: int, position: int, route: Route, works: Sequence[Work], main: Key) -> ExpertSplit:
    units, phase = cost.units, len(cost.profile.phases) - 1
    copied = route.choice.rows * min(route.expert_tensors, default=0)  # by "batched_mm": the host computes with views
    beside = [work for work in works if work.kind != PRODUCT and not 0 < copied <= work.nbytes]
    tokens = Inputs(OUTSIDE, 1, route.nbytes)
    products = Inputs(OUTSIDE, 1, route.nbytes * route.choice.per_token)
    crossing = units.to_host(tokens, main) + units.from_host(products, main) + units.from_host(PLACES, main)
    bookkeeping = units.machine.expert_overhead.module
    return ExpertSplit(
        fetch=units.fetch_on_demand(_expert_bytes(cost, unit, position), (HOST, main), 0),
        compute=units.expert_seconds(phase, unit, position, HOST),
        start=crossing + bookkeeping + units.of_works(beside, HOST) + units.of_works(beside, main),
        below=route.choice.tokens + 1,
    )


def _expert_bytes(cost: CostModel, unit: int, position: int) -> int:
    return cost.profile.units[unit].experts[position].nbytes
