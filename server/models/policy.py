"""Which loaded models make room for another: numbers in, names out.

A model is loaded as it would be alone. Others stay where there is room for them beside that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

Key = int | str
"""A device as plans name it."""


@dataclass(frozen=True)
class LoadedShare:
    """What a loaded model has of the budgets.

    Attributes:
        name: its name.
        claimed: most bytes that it takes of each device.
        idle: whether no request runs on it.
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


def to_unload(needed: Mapping[Key, int], budgets: Mapping[Key, int], loaded: Seq[LoadedShare]) -> list[str]:
    """Names of the models to unload so that ``needed`` fits beside the others; none where it fits already.

    Idle ones go before those that have to be waited for, and of these the least recently used first. One whose memory
    does not help stays.
    """
    order = sorted(loaded, key=lambda share: (not share.idle, share.last_used))
    going: list[LoadedShare] = []
    for share in order:
        if fits(needed, left_of(budgets, _without(order, going))):
            break
        going.append(share)
    for share in reversed(going[:]):
        fewer = _without(going, [share])
        if fits(needed, left_of(budgets, _without(order, fewer))):
            going = fewer
    return [share.name for share in going]


def _without(shares: Seq[LoadedShare], others: Seq[LoadedShare]) -> list[LoadedShare]:
    return [share for share in shares if share not in others]
