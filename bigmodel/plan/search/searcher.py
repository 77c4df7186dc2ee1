"""The assignment of least time for a profile: the search over groups, checked to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...arguments import check_choice
from ...devices import DISK, HOST
from ...profile import Profile
from ..memory.assignment import Assignment
from ..memory.evaluate import device_uses, over_budget
from ..result.budgets import Key, is_accelerator
from ..result.plan import Prediction
from ..time.cost import Objective
from ..time.per_pass import per_pass
from .capacity import Placement, Room
from .feasibility import Option
from .fit import ATTEMPTS
from .items import assignment_of, item_of, tie_groups
from .search import search

OFFLOADS = ("stream", "compute", "auto")
"""What happens to parts that do not fit the accelerators."""

GIB = 2**30


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

    def best(self, room: Room, known: Assignment, thorough: bool = True) -> Assignment:
        """Return the assignment of least time under the budgets, `known` if none is better.

        The search counts an upper bound of the activations and no transfers between devices. Its result is evaluated
        exactly; if that is over a budget, the search is repeated with the budget lowered by the excess.
        """
        return self._best(room, known, lambda found: [found], thorough)

    def best_per_pass(self, room: Room, known: Assignment) -> Assignment:
        """Return the best variant in which units run elsewhere for prompts than in steps; `known` if none is better."""
        at_hand = [found for found in self._per_pass(room, known) if not self._over(found, room)]
        best = min([known, *at_hand], key=self.goal.seconds)
        return self._best(room, best, lambda found: self._per_pass(room, found))

    def _per_pass(self, room: Room, found: Assignment) -> list[Assignment]:
        return list(per_pass(self.goal.cost, found, room.slots))

    def _over(self, found: Assignment, room: Room) -> dict[Key, int]:
        return over_budget(device_uses(self.profile, found), room.budgets)

    def _best(
        self,
        room: Room,
        known: Assignment,
        variants: Callable[[Assignment], Sequence[Assignment]],
        thorough: bool = True,
    ) -> Assignment:
        """Return the best of `known` and the variants of each search result, under budgets lowered until one fits."""
        given, best = dict(room.budgets), known
        for _ in range(ATTEMPTS):
            seconds = partial(self._seconds, room=room)
            placement = search(self.items, replace(room, budgets=given), seconds, self._least, thorough)
            if placement is None:
                break
            base = self._assignment(placement, room)
            found = [(one, self._over(one, room)) for one in variants(base)]
            best = min([best, *(one for one, over in found if not over)], key=self.goal.seconds)
            least_over = min((over for _, over in found), key=lambda over: sum(over.values()), default={})
            if not least_over:
                break
            uses = device_uses(self.profile, base)
            for key, excess in least_over.items():
                used = uses[key].total if key in uses else 0
                given[key] = max(min(given.get(key, 0), used) - excess, 0)
        return best

    def predict(self, room: Room, assignment: Assignment) -> Prediction:
        """Return the predicted time of an assignment, and the seconds that one more GiB on each device would save."""
        steps = self.goal.steps(assignment)
        now = self.goal.seconds(assignment)
        saved = {}
        for key in room.budgets:
            if key == DISK or (room.budgets[key] <= 0 and is_accelerator(key)):
                continue
            more = replace(room, budgets={**room.budgets, key: room.budgets[key] + GIB})
            then = self.goal.seconds(self.best(more, assignment, thorough=False))
            saved[key] = max(0.0, now - then) / max(sum(self.goal.weights.values()), 1.0)
        prefill = steps[0].seconds if len(steps) > 1 else None
        return Prediction(prefill, steps[-1].seconds, steps[-1].binds, saved)

    def _assignment(self, placement: Placement, room: Room) -> Assignment:
        return assignment_of(self.profile, self.groups, placement, self.stream_buffers, room)

    def _seconds(self, placement: Placement, room: Room) -> float:
        return self.goal.seconds(self._assignment(placement, room))

    def _least(self, index: int, option: Option) -> tuple[float, float]:
        held, runs = option
        cost = self.goal.cost.units
        compute = fetch = 0.0
        for unit in self.groups[index].members:
            where = HOST if self.profile.units[unit].is_lookup and not is_accelerator(held) else runs
            for phase, weight in self.goal.weights.items():
                compute += weight * cost.least_compute(phase, unit, where)
                fetch += weight * cost.fetch(phase, unit, (held, where), 0, self.stream_buffers, experts=0)
        return compute, fetch
