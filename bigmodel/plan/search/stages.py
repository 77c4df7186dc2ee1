"""`StageSearch`: a model that is resident on several accelerators, divided such that its stages take even times.

The greedy placement fills accelerators in order and the search looks at the time of one pass, for which it does not
matter how the layers are divided. With several steps in flight it does: the slowest stage bounds the throughput.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ...profile import Profile
from ...profile.trace.events import OUTSIDE
from ..memory.assignment import Assignment, memory_usage
from ..result.budgets import Key, is_accelerator
from ..result.stages import WORTHWHILE
from ..time.cost import Objective
from ..time.stages import predict_stages, stage_devices
from .balance import Share, even_cuts
from .filling import attempts_of
from .items import Capacity, Group, GroupPlacement, Item, assignment_of, item_of, tie_groups

FASTER = 0.99
"""The slowest stage must take less than this share of the seconds of the slowest one before."""


AS_FAST = 1.02
"""A pass with all lookups resident may take so many times the seconds of one with some on the host."""


class StageSearch:
    """Divides the units of one profile into stages.

    Args:
        profile: the model.
        goal: what is minimised: its weights are those of the phases whose times are to be even.
        stream_buffers: as of the assignments that are given.
    """

    def __init__(self, profile: Profile, goal: Objective, stream_buffers: bool) -> None:
        self.profile = profile
        self.goal = goal
        self.stream_buffers = stream_buffers
        self.groups = tie_groups(profile.units)
        self.items = [item_of(group, profile, stream_buffers) for group in self.groups]

    def best(self, capacity: Capacity, known: Assignment) -> Assignment:
        """Return the assignment with the fastest slowest stage; `known` if it streams or computes on the host, or is as
        fast. Lookups that `known` has on the host become resident: stages have none.

        With the objective "throughput" a model that fits on fewer accelerators is divided over all of them, if steps in
        flight are predicted to be worth it there. Otherwise those that `known` uses share it.
        """
        used = [key for key in dict.fromkeys(known.execution) if is_accelerator(key)]
        keys = [known.main, *(key for key in capacity.accelerators if key != known.main)]
        if not used or len(keys) < 2:
            return known
        if self.goal.name == "throughput":
            spread = self._even(keys, capacity, known)
            if spread is not None and WORTHWHILE * self._turn(spread) < self._turn(known):
                return spread
        if len(used) < 2:
            return known
        found = self._even([key for key in keys if key in used], capacity, known)
        if found is None:
            return known
        if not stage_devices(known):
            return found if self.goal.seconds(found) <= AS_FAST * self.goal.seconds(known) else known
        return found if self.slowest(found) < FASTER * self.slowest(known) else known

    def slowest(self, found: Assignment) -> float:
        """Return the weighted seconds of the device that computes longest."""
        busy = {found.main: self._seconds(OUTSIDE, found.main)}
        for unit, key in enumerate(found.execution):
            busy[key] = busy.get(key, 0.0) + self._seconds(unit, key)
        return max(busy.values())

    def _even(self, keys: Sequence[Key], capacity: Capacity, known: Assignment) -> Assignment | None:
        """Return the assignment to these accelerators, in order, whose slowest stage takes least; None if the model
        does not fit them.

        Groups that must be on the main device, the first one, stay there, and so do those of units far apart.
        """
        groups = list(enumerate(zip(self.groups, self.items, strict=True)))
        fixed = [at for at, (group, item) in groups if _stays(group, item)]
        free = [at for at, (group, item) in groups if not _stays(group, item)]
        begun = self._seconds(OUTSIDE, known.main) + sum(self._of_group(at, known.main) for at in fixed)
        held = sum(self.items[at].nbytes for at in fixed)
        budgets = dict(capacity.budgets)
        for _ in range(attempts_of(capacity)):
            shares = []
            for key in keys:
                more, seconds = (held, begun) if key == known.main else (0, 0.0)
                room = budgets[key] - capacity.activations - more
                shares.append(Share([self._of_group(at, key) for at in free], room, seconds))
            cuts = even_cuts([self.items[at].nbytes for at in free], shares)
            if cuts is None:
                return None
            devices = dict.fromkeys(fixed, known.main)
            devices |= {at: keys[bisect_right(cuts, place)] for place, at in enumerate(free)}
            where = tuple(devices[at] for at in range(len(self.groups)))
            placement = GroupPlacement(where, where, known.main)
            found = assignment_of(self.profile, self.groups, placement, self.stream_buffers, capacity)
            over = memory_usage(self.profile, found).over(capacity.budgets)
            if not over:
                return found
            for key, excess in over.items():
                budgets[key] = budgets.get(key, 0) - excess
        return None

    def _of_group(self, at: int, key: Key) -> float:
        return sum(self._seconds(unit, key) for unit in self.groups[at].members)

    def _seconds(self, unit: int, key: Key) -> float:
        """Return the weighted seconds of a unit on a device, over all phases."""
        cost = self.goal.cost.units
        return sum(weight * cost.compute(phase, unit, key) for phase, weight in self.goal.weights.items())

    def _turn(self, found: Assignment) -> float:
        """Return the seconds in which each sequence gets a token, with as many steps in flight as are fastest."""
        sequences = self.profile.workload.batch_size
        stages = predict_stages(self.goal.cost, found)
        if stages is None:
            return self.goal.cost.seconds(len(self.profile.phases) - 1, found).seconds
        return stages.turn_seconds(sequences, stages.steps(sequences))


def _stays(group: Group, item: Item) -> bool:
    """Whether a group stays on the main device where a model is divided into stages."""
    first, last = group.members[0], group.members[-1]
    return item.pinned or item.lends or last - first >= len(group.members)
