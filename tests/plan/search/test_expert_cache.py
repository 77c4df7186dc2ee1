"""Caches of experts of no given size: halved until an accelerator runs anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bigmodel.plan.memory.assignment import Assignment
from bigmodel.plan.search.expert_cache import HALVINGS, with_cache_that_fits
from bigmodel.plan.search.items import Capacity

HERE = Assignment((0,), (0,), 0)
IDLE = Assignment(("cpu",), ("cpu",), "cpu")

LARGEST = 1000
"""Bytes of the larger of two slots."""

MIXTURE: Any = SimpleNamespace(
    units=[SimpleNamespace(slot_bytes=lambda: 10), SimpleNamespace(slot_bytes=lambda: LARGEST)]
)


def chosen(room: int, capacity: Capacity) -> tuple[int | None, bool, int]:
    """Return the cache that is chosen, whether an accelerator runs anything, and how many sizes are tried.

    Args:
        room: bytes of the largest cache beside which an accelerator runs anything.
        capacity: the budgets.
    """
    tried: list[int | None] = []

    def greedy(capacity: Capacity) -> Assignment:
        tried.append(capacity.expert_cache)
        size = 2 * LARGEST if capacity.expert_cache is None else capacity.expert_cache
        return HERE if size <= room else IDLE

    kept, found = with_cache_that_fits(MIXTURE, capacity, greedy)
    return kept.expert_cache, found is HERE, len(tried)


def test_the_default_size_is_kept_where_it_fits() -> None:
    assert chosen(2 * LARGEST, Capacity({0: 1, "cpu": 1}, slots=2)) == (None, True, 1)


def test_the_size_of_all_slots_is_halved_until_it_fits() -> None:
    assert chosen(LARGEST, Capacity({0: 1, "cpu": 1}, slots=2)) == (LARGEST, True, 2)
    assert chosen(LARGEST // 4, Capacity({0: 1, "cpu": 1}, slots=2)) == (LARGEST // 4, True, 4)


def test_the_default_size_is_kept_where_no_size_fits() -> None:
    assert chosen(0, Capacity({0: 1, "cpu": 1}, slots=2)) == (None, False, 1 + HALVINGS)


def test_a_given_size_and_a_host_without_accelerators_are_left_alone() -> None:
    assert chosen(0, Capacity({0: 1, "cpu": 1}, expert_cache=7)) == (7, False, 1)
    assert chosen(0, Capacity({"cpu": 1})) == (None, False, 1)
