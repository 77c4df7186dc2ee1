"""Plans with keys and values on the host, for models whose accelerators have no room for all of them.

As few layers as possible keep theirs on the host. Of these as many tokens as possible are in RAM, older ones on disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...devices import DISK, HOST
from ...errors import BudgetError
from ...profile import Profile
from ..memory.host_kv import least_in_ram, with_kv_on_host
from ..result.budgets import Key
from ..result.plan import Plan

Fits = Callable[[Profile, Sequence[int]], bool]
"""Whether accelerators run all of some units of a profile."""

Runs = Callable[[Mapping[Key, int], Profile, Sequence[int]], bool]
"""Whether accelerators run all of some units of a profile within budgets."""

SHARES = 64
"""Shares of the context that are tried to be in RAM."""

WORTHWHILE_SHARE = 0.9
"""Keys and values on the host must take less than this share of the seconds of a plan without: how their copies and
those of streamed weights take turns on a link is not simulated."""


def plan_with_kv_on_host(
    profile: Profile, budgets: Mapping[Key, int], runs: Runs, plan_of: Callable[[Profile], Plan]
) -> Plan | None:
    """Return the plan with the keys and values of as few units on the host as have accelerators run all units that have
    any; None if there is none, or these run all as it is.

    Args:
        profile: the model.
        budgets: bytes by device key.
        runs: whether accelerators run all of some units of a profile within budgets.
        plan_of: returns the plan of a profile.

    Raises:
        BudgetError: the plan does not fit.
    """
    if not growing_units(profile):
        return None
    # RAM may hold those of some layers and not of all: how many accelerators need is found without its budget.
    enough = {**budgets, HOST: budgets.get(HOST, 0) + sum(profile.kv_cache)}
    least = least_layers(profile, partial(runs, enough))
    if least is None or not runs(budgets, least, growing_units(profile)):
        least = least_layers(profile, partial(runs, budgets))
    return None if least is None else plan_of(least)


def plan_with_kv_on_disk(
    profile: Profile, budgets: Mapping[Key, int], runs: Runs, plan_of: Callable[[Profile], Plan]
) -> Plan | None:
    """Return the plan with the keys and values of as few units on the host as must be there, and with as many tokens of
    them in RAM as it has room for, the others being on disk; None if there is none. The arguments are those of
    `plan_with_kv_on_host`."""
    if not growing_units(profile):
        return None
    anywhere = {key: size for key, size in budgets.items() if key != DISK}
    most = most_in_ram(profile, partial(runs, anywhere))
    try:
        return None if most is None else plan_of(most)
    except BudgetError:  # that of the disk: the error for the model as it is says what would do
        return None


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


def is_worthwhile(other: Plan, made: Plan, objective: str | None) -> bool:
    """Whether a plan with keys and values on the host is to replace one in which the host computes some units.

    Args:
        other: the plan with keys and values on the host.
        made: the plan without.
        objective: the quantity that is minimised, as for `plan`.

    Returns:
        Whether it is predicted to take less than `WORTHWHILE_SHARE` of the seconds; True if nothing is predicted.
    """
    if other.prediction is None or made.prediction is None:
        return True
    if objective == "throughput":
        return (made.tokens_per_second or 0.0) < WORTHWHILE_SHARE * (other.tokens_per_second or 0.0)
    return other.prediction.token < WORTHWHILE_SHARE * made.prediction.token
