"""The assignment of least time that keeps the budgets to the byte.

Search and evaluation count with one class, `MemoryUsage`. The search bounds activations and knows no transfers between
devices, as an exact replay walks the whole trace for each candidate; so the result alone is replayed, and if that is
over a budget, the budget is lowered by the excess and the placement repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from ...arguments import check_choice
from ...devices import DISK, HOST
from ...profile import Profile
from ..memory.assignment import Assignment, memory_usage
from ..memory.usage import MemoryUsage
from ..result.budgets import Key, is_accelerator
from ..result.plan import Prediction
from ..time.cost import Objective
from ..time.expert_split import with_split
from ..time.per_pass import per_pass
from .branch_and_bound import Seconds
from .filling import ATTEMPTS, Attempt, Option, attempts_of, filled, into_ram, repeat_until_within
from .items import Capacity, GroupPlacement, assignment_of, item_of, tie_groups
from .search import search
from .spread import spread

OFFLOADS = ("stream", "compute", "auto")
"""Ways to run parts that do not fit the accelerators."""

GIB = 2**30

ROUNDING = 1e-9
"""Share of the seconds by which equal ones may differ, as sums of the same terms in other orders do."""


class Searcher:
    """Searches the assignments of one profile.

    Args:
        profile: the model.
        goal: what to minimise.
        offload: one of `OFFLOADS`.
        stream_buffers: buffers are held with the weights, and not where the unit runs.
    """

    def __init__(
        self, profile: Profile, goal: Objective, offload: str = "stream", stream_buffers: bool = False
    ) -> None:
        check_choice("offload", offload, OFFLOADS)
        self.profile = profile
        self.goal = goal
        self.stream_buffers = stream_buffers
        self.groups = tie_groups(profile.units)
        self.items = [item_of(group, profile, stream_buffers, offload != "compute") for group in self.groups]
        self._last: tuple[Assignment, MemoryUsage] | None = None

    def best_of_all(
        self,
        capacity: Capacity,
        known: Assignment,
        streaming: tuple[Capacity, Assignment] | None = None,
        *,
        may_spread: bool = False,
        may_change: bool = False,
        may_split: bool = False,
    ) -> tuple[Capacity, Assignment]:
        """Return the assignment of least time of those that all searches find, with its capacity.

        Args:
            capacity: the budgets.
            known: an assignment that keeps them.
            streaming: another one, of a mixture, in which the host computes nothing, with its capacity; None: none.
            may_spread: units may be streamed to several accelerators (`best_spread`).
            may_change: units may run elsewhere for prompts than in steps (`best_per_pass`).
            may_split: the host may compute some of the missing experts beside `streaming` (`best_split`).
        """
        best = self.best(capacity, known)
        if streaming is not None:
            found = self.best(*streaming)
            if self.goal.seconds(found) < self.goal.seconds(best):
                capacity, best = streaming[0], found
        if may_spread:
            best = self.best_spread(capacity, best)
        if may_change:
            best = self.best_per_pass(capacity, best)
        return self.best_split(capacity, best, streaming) if streaming is not None and may_split else (capacity, best)

    def best(self, capacity: Capacity, known: Assignment, thorough: bool = True) -> Assignment:
        """Return the assignment of least time under the budgets, `known` if none is better.

        The search counts an upper bound of the activations and no transfers between devices. Its result is evaluated
        exactly; if that is over a budget, the search is repeated with the budget lowered by the excess.
        """
        return self._best(capacity, known, lambda found: [found], thorough)

    def best_per_pass(self, capacity: Capacity, known: Assignment) -> Assignment:
        """Return the best variant in which units run elsewhere for prompts than in steps; `known` if none is better."""
        variants = [found for found in self._per_pass(capacity, known) if not self._over(found, capacity)]
        best = self._fastest([known, *variants])
        return self._best(capacity, best, lambda found: self._per_pass(capacity, found))

    def best_split(
        self, capacity: Capacity, known: Assignment, streaming: tuple[Capacity, Assignment]
    ) -> tuple[Capacity, Assignment]:
        """Return the best variant in which the host computes some of the missing experts, with its capacity; `known`
        with its own if none is better.

        Args:
            capacity: the budgets.
            known: the best assignment without.
            streaming: an assignment that streams whatever does not fit, with its capacity: `known` may compute all
                experts on the host.
        """
        found = [(capacity, known)]
        for where, base in ((capacity, known), streaming):
            found += [(where, one) for one in with_split(self.goal.cost, base) if not self._over(one, where)]
        return min(found, key=lambda one: self.goal.seconds(one[1]))

    def best_spread(self, capacity: Capacity, known: Assignment) -> Assignment:
        """Return the best assignment that streams over the links of several accelerators; `known` if none is worth it.

        Slots take memory on each of them. So the placement of the others is repeated under lower budgets until the
        spread one fits; if it never does, the accelerator with the smallest budget is left out.
        """
        others = [key for key in capacity.accelerators if key != known.main]
        others.sort(key=capacity.budgets.__getitem__)
        if not any(map(known.streamed, range(len(known.storage)))):
            return known
        for left_out in range(len(others)):
            found = self._best_over((known.main, *others[left_out:]), capacity, known)
            if self.goal.seconds(found) < WORTHWHILE_SHARE * self.goal.seconds(known):
                return found
        return known

    def _best_over(self, accelerators: Sequence[Key], capacity: Capacity, known: Assignment) -> Assignment:
        def over_links(base: Assignment) -> list[Assignment]:
            others = [key for key in accelerators if key != base.main]
            found = spread(self.goal.cost.units, base, others, capacity.slots)
            return [found] if found.is_spread else []

        def seconds(placement: GroupPlacement, below: float) -> float:
            found = over_links(self._assignment(placement, capacity))
            return min((self.goal.seconds(one, below) for one in found), default=inf)

        return self._best(capacity, known, over_links, False, seconds)

    def _per_pass(self, capacity: Capacity, found: Assignment) -> list[Assignment]:
        return list(per_pass(self.goal.cost, found, capacity.slots))

    def _over(self, found: Assignment, capacity: Capacity) -> dict[Key, int]:
        return self._usage(found).over(capacity.budgets)

    def _usage(self, found: Assignment) -> MemoryUsage:
        """Return the memory of an assignment; a replay takes long, so the last one is kept."""
        if self._last is None or self._last[0] is not found:
            self._last = found, memory_usage(self.profile, found)
        return self._last[1]

    def _best(
        self,
        capacity: Capacity,
        known: Assignment,
        variants: Callable[[Assignment], Sequence[Assignment]],
        thorough: bool = True,
        seconds: Seconds | None = None,
    ) -> Assignment:
        """Return the best of `known` and the variants of each search result, under budgets lowered until one fits.

        The search minimises `seconds`; None: those of its result itself.
        """
        best = known
        minimised = seconds or partial(self._seconds, capacity=capacity)

        def attempt(budgets: Mapping[Key, int]) -> Attempt | None:
            nonlocal best
            placement = search(self.items, replace(capacity, budgets=budgets), minimised, self._least, thorough)
            if placement is None:
                return None
            base = self._assignment(placement, capacity)
            found = [(one, self._over(one, capacity)) for one in variants(base) if self._is_faster(one, best)]
            # In front of the others: of equal times, the one with less on disk is taken.
            in_ram = [] if seconds else self._in_ram(placement, capacity)
            best = self._fastest([*in_ram, best, *(one for one, over in found if not over)])
            least_over = min((over for _, over in found), key=lambda over: sum(over.values()), default={})
            counted = filled(self.items, replace(capacity, budgets=budgets), placement).usage
            return Attempt(self._usage(base) if least_over else counted, counted, least_over)

        repeat_until_within(capacity.budgets, attempt, attempts_of(capacity))
        return best

    def _fastest(self, found: Sequence[Assignment]) -> Assignment:
        """Return the assignment of least time; of equal ones, but for the rounding of sums, the first."""
        seconds = [self.goal.seconds(one) for one in found]
        enough = (1 + ROUNDING) * min(seconds)
        return next(one for one, each in zip(found, seconds, strict=True) if each <= enough)

    def _is_faster(self, one: Assignment, other: Assignment) -> bool:
        """Return whether an assignment takes less time than another, by more than the rounding of sums."""
        return (1 + ROUNDING) * self.goal.seconds(one) < self.goal.seconds(other)

    def _in_ram(self, placement: GroupPlacement, capacity: Capacity) -> list[Assignment]:
        """Return the placement with what fits of its groups on disk in RAM instead; none if nothing does."""
        budgets = dict(capacity.budgets)
        for _ in range(ATTEMPTS):
            raised = into_ram(self.items, replace(capacity, budgets=budgets), placement)
            if raised is None:
                break
            found = self._assignment(raised, capacity)
            over = self._over(found, capacity)
            if not over:
                return [found]
            budgets[HOST] -= over.get(HOST, budgets[HOST])
        return []

    def predict(self, capacity: Capacity, assignment: Assignment) -> Prediction:
        """Return the predicted time of an assignment, and the seconds that one more GiB on each device would save.

        Accelerators that are as fast and have equal budgets save alike, but for the main one: one of them is searched.
        """
        steps = self.goal.steps(assignment)
        now = self.goal.seconds(assignment)
        saved: dict[Key, float] = {}
        alike: dict[object, Key] = {}
        for key in capacity.budgets:
            if key == DISK or (capacity.budgets[key] <= 0 and is_accelerator(key)):
                continue
            first = alike.setdefault(self._kind(key, capacity.budgets[key], assignment), key)
            saved[key] = saved[first] if first in saved else self._saved(key, capacity, assignment, now)
        prefill = steps[0].seconds * self.profile.phases[0].repeats if len(steps) > 1 else None
        paused = self.goal.cost.seconds_after_pause(len(steps) - 1, assignment)
        return Prediction(prefill, steps[-1].seconds, steps[-1].binds, saved, paused)

    def _kind(self, key: Key, budget: int, assignment: Assignment) -> object:
        """Return a value that is equal for accelerators of which each saves as much as another with more memory."""
        if key == assignment.main or not is_accelerator(key):
            return key
        machine, name = self.goal.cost.units.machine, self.goal.cost.units.name(key)
        return budget, key in _links_of(assignment), id(machine.device(name)), id(machine.link(name))

    def _saved(self, key: Key, capacity: Capacity, assignment: Assignment, now: float) -> float:
        """Return the seconds that one more GiB on a device saves of an assignment that takes `now`."""
        more = replace(capacity, budgets={**capacity.budgets, key: capacity.budgets[key] + GIB})
        divided = self.goal.name == "throughput" and assignment.is_resident  # for the sake of steps in flight
        found = assignment if divided else self.best(more, assignment, thorough=False)
        if assignment.is_spread:
            found = self._best_over(_links_of(assignment), more, found)
        return max(0.0, now - self.goal.seconds(found)) / max(sum(self.goal.weights.values()), 1.0)

    def _assignment(self, placement: GroupPlacement, capacity: Capacity) -> Assignment:
        return assignment_of(self.profile, self.groups, placement, self.stream_buffers, capacity)

    def _seconds(self, placement: GroupPlacement, below: float, capacity: Capacity) -> float:
        return self.goal.seconds(self._assignment(placement, capacity), below)

    def _least(self, index: int, option: Option) -> list[tuple[float, float]]:
        """Return lower bounds of the weighted seconds of a group, for each phase: of computing, and on the link."""
        storage, execution = option
        cost = self.goal.cost.units
        bounds = []
        for phase, weight in self.goal.weights.items():
            compute = fetch = 0.0
            for unit in self.groups[index].members:
                where = HOST if self.profile.units[unit].is_lookup and not is_accelerator(storage) else execution
                fetched = cost.fetch(phase, unit, (storage, where), 0, self.stream_buffers, experts=0)
                compute += cost.least_compute(phase, unit, where) + (cost.disturbance(unit, where) if fetched else 0.0)
                fetch += fetched
            bounds.append((weight * compute, weight * fetch))
        return bounds


def _links_of(assignment: Assignment) -> tuple[Key, ...]:
    """Return the accelerators that units are streamed to."""
    streamed = filter(assignment.streamed, range(len(assignment.storage)))
    return tuple(dict.fromkeys(assignment.execution[index] for index in streamed))


WORTHWHILE_SHARE = 0.99
"""Streaming over several links must take less than this share of the seconds over one: their hops also take what no
prediction counts."""


def capacity_around(assignment: Assignment, capacity: Capacity) -> Capacity:
    """Return the capacity to search from a greedy assignment: its main device is the assignment's if the usual one has
    nothing to do."""
    if capacity.main in assignment.execution or not is_accelerator(assignment.main):
        return capacity
    return replace(capacity, main_device=assignment.main)
