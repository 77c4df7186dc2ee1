"""Variants of an assignment that stream units to the accelerator for prompts and compute them on the host in steps.

A step of generation multiplies each weight by a few rows: the host reads its weights about as fast as a link transfers
them, and only activations move. A prompt multiplies them by many rows, which is worth the transfer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import replace

from ...devices import HOST
from ...profile.trace.work import scale_work
from ..memory.assignment import Assignment
from ..result.budgets import Key, is_accelerator
from .cost import CostModel
from .unit_cost import UnitCost, separate_units


def per_pass(cost: CostModel, known: Assignment, slots: int) -> Iterator[Assignment]:
    """Yield variants of an assignment that stream some units for prompts and compute them on the host in steps.

    These units are held in host memory and each takes less time this way, by `streamed_from`: in one variant all that
    `known` computes there, in one all that it streams, in one both. Budgets are not checked.

    Args:
        cost: predicts seconds.
        known: an assignment that either streams or computes each of them.
        slots: how many streamed units may be on the main device at once.
    """
    if not is_accelerator(known.main) or cost.profile.offload_dtype is not None:
        return
    separate = (index for index in sorted(separate_units(cost.profile.units)) if known.storage[index] == HOST)
    below = {index: streamed_from(cost.units, index, known.main) for index in separate}
    found = {index: tokens for index, tokens in below.items() if tokens is not None}
    computed = [index for index in found if known.execution[index] == HOST]
    streamed = [index for index in found if known.execution[index] == known.main]
    for chosen in {frozenset(computed), frozenset(streamed), frozenset((*computed, *streamed))} - {frozenset()}:
        yield _switching(cost, known, {index: found[index] for index in sorted(chosen)}, slots)


def _switching(cost: CostModel, known: Assignment, below: dict[int, int], slots: int) -> Assignment:
    execution = tuple(known.main if index in below else key for index, key in enumerate(known.execution))
    found = replace(known, execution=execution, computed_below=below)
    slot_sizes = _slot_sizes(cost, found, below)
    return replace(found, slots=min(slots, len(slot_sizes)), slot_bytes=max(slot_sizes, default=0))


def _slot_sizes(cost: CostModel, found: Assignment, below: Collection[int]) -> list[int]:
    """Return the bytes of the slot that each streamed unit needs."""
    return [
        unit.slot_bytes(found.stream_buffers or index in below)
        for index, unit in enumerate(cost.profile.units)
        if found.streamed(index) and unit.nbytes and not unit.is_lookup
    ]


def streamed_from(cost: UnitCost, unit: int, main: Key) -> int | None:
    """Return the least tokens of a call for which streaming a unit to `main` beats computing it on the host.

    Operations between a step and a prompt are scaled in proportion to tokens. A fetch counts whole, because what it
    overlaps with is not known here.

    Returns:
        Tokens (sequences x tokens of each); None if streaming wins for both prompt and step, or for neither.
    """
    tokens = [phase.tokens * cost.profile.workload.batch_size for phase in cost.profile.phases]
    if len(tokens) != 2 or not cost.works[1].get(unit):
        return None
    many, few = tokens

    def computing_wins(number: int) -> bool:
        works, share = (cost.works[1][unit], 1.0) if number == tokens[1] else (prompt, number / tokens[0])
        some = [scale_work(work, share) for work in works]
        return cost.of_works(some, HOST) < max(fetch, cost.of_works(some, main))

    prompt, fetch = cost.works[0].get(unit, ()), cost.fetch(0, unit, (HOST, main), 0)
    if many <= few or computing_wins(many) or not computing_wins(few):
        return None
    return few + 1 + bisect_left(range(few + 1, many), True, key=lambda number: not computing_wins(number))
