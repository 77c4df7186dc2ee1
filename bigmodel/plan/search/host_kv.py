"""The search for the layers whose keys and values lie on the host: as few as must, as much in RAM as can."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from ...profile import Profile
from ..memory.host_kv import least_in_ram, with_kv_on_host

Fits = Callable[[Profile, Sequence[int]], bool]
"""Whether accelerators run all of some units of a profile."""

SHARES = 64
"""Shares of the context that are tried to be in RAM."""


def least_layers(profile: Profile, fits: Fits, in_ram: int = 0) -> Profile | None:
    """Return the profile with the keys and values of as few units on the host as have accelerators run all units that
    have any; None if there is none, or these run all as it is.

    Args:
        profile: the model.
        fits: whether a profile fits.
        in_ram: as for `with_kv_on_host`.
    """
    units = growing_units(profile)

    def of(count: int) -> Profile:
        return with_kv_on_host(profile, [units[at * len(units) // count] for at in range(count)], in_ram)  # far apart

    def enough(count: int) -> bool:
        return fits(of(count), units)

    if enough(0) or not enough(len(units)):
        return None
    return of(bisect_left(range(1, len(units)), True, key=enough) + 1)


def most_in_ram(profile: Profile, fits: Fits) -> Profile | None:
    """Return the profile of `least_layers` with as many recent tokens in RAM as fit, older ones being on disk; None if
    there is none."""
    tokens = profile.workload.context_length
    units = growing_units(profile)
    few = least_in_ram(profile)
    shares = sorted({share for part in range(1, SHARES) if (share := tokens * part // SHARES) >= few})
    least = least_layers(profile, fits, shares[0]) if shares else None
    if least is None:
        return None
    chosen = [index for index in units if least.kv_on_host[index]]

    def of(in_ram: int) -> Profile:
        return with_kv_on_host(profile, chosen, in_ram)

    at = bisect_left(shares, True, key=lambda in_ram: not fits(of(in_ram), units))
    return of(shares[at - 1])


def growing_units(profile: Profile) -> list[int]:
    """Return the positions of the units whose keys and values grow with the context, in order."""
    return [index for index in sorted(profile.growing) if profile.kv_cache[index]]
