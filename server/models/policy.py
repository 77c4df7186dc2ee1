"""Which loaded models make room for another: numbers in, names out.

A model gets what others leave where that is nearly as good as having the whole budgets. Else others are unloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigmodel.devices import DISK
from bigmodel.plan.result.budgets import is_accelerator

if TYPE_CHECKING:
    from bigmodel.plan import Plan

Key = int | str
"""A device as plans name it."""

NEARLY = 1.25
"""Bytes off the accelerators that a plan may have to be nearly as good as another, in units of that one's: each step of
generation fetches them. So for those on disk, and those that the host computes. Where all could be resident, streaming
any is not nearly as good."""


@dataclass(frozen=True)
class LoadedShare:
    """What a loaded model has of the budgets.

    Attributes:
        name: its name.
        claimed: most bytes that it takes of each device.
        idle: whether no request uses it.
        last_used: when it was used last, on any clock.
    """

    name: str
    claimed: Mapping[Key, int]
    idle: bool
    last_used: float


def left_of(budgets: Mapping[Key, int], loaded: Iterable[LoadedShare]) -> dict[Key, int]:
    """Bytes of each device's budget that loaded models leave."""
    left = dict(budgets)
    for share in loaded:
        for key in left.keys() & share.claimed.keys():
            left[key] -= share.claimed[key]
    return left


def fits(needed: Mapping[Key, int], left: Mapping[Key, int]) -> bool:
    """Whether what a model needs of each device is there. A device without a budget has no limit."""
    return all(nbytes <= left[key] for key, nbytes in needed.items() if key in left)


def nearly_as_good(made: Plan, best: Plan) -> bool:
    """Whether steps by a plan take little longer than by the one that has more memory."""
    return all(mine <= NEARLY * other for mine, other in zip(_slow_bytes(made), _slow_bytes(best), strict=True))


def _slow_bytes(plan: Plan) -> tuple[int, int, int]:
    """Bytes of the parts that are off the accelerators, of those on disk, and of those that the host computes."""
    off = sum(part.bytes for part in plan.parts if not is_accelerator(part.device))
    on_disk = sum(part.bytes for part in plan.parts if part.device == DISK)
    return off, on_disk, sum(part.bytes for part in plan.parts if not is_accelerator(part.runs_on))


def to_unload(
    budgets: Mapping[Key, int], loaded: Seq[LoadedShare], enough: Callable[[Mapping[Key, int]], bool]
) -> list[str]:
    """Names of the models to unload so that what the others leave is enough; none where it is already.

    Idle ones go before those that have to be waited for, and of these the least recently used first. One whose memory
    does not help stays.

    Args:
        budgets: bytes of each device for all models.
        loaded: those that are loaded.
        enough: whether so many bytes of each device do; the whole budgets are taken to.
    """
    order = sorted(loaded, key=lambda share: (not share.idle, share.last_used))
    going: list[LoadedShare] = []
    while len(going) < len(order) and not enough(left_of(budgets, _without(order, going))):
        going.append(order[len(going)])
    for share in reversed(going[:-1]):  # without the last it was not enough
        fewer = _without(going, [share])
        if enough(left_of(budgets, _without(order, fewer))):
            going = fewer
    return [share.name for share in going]


def _without(shares: Seq[LoadedShare], others: Seq[LoadedShare]) -> list[LoadedShare]:
    return [share for share in shares if share not in others]
