"""Filling devices with groups: `Filling`, which greedy placement, search and branch and bound all place with.

`MemoryUsage` counts what is placed: slots, restore buffers, expert caches, read-ahead and staging with the rest.

The greedy placement keeps as many bytes as possible resident on accelerators. The rest lies in RAM or is viewed on
disk, and is streamed: copied into a slot on the main device when its turn comes, and run there. A unit too large for
the slots runs on the CPU where that is allowed. If the accelerators cannot hold what they must, the CPU runs all units.
Devices are filled in order (`fill_in_order`); `balanced_caps` are the budgets under which that spreads a model evenly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...devices import DISK, HOST
from ...devices.virtual.allocator import LARGE_SEGMENT
from ...profile import Profile
from ..memory.assignment import Assignment, memory_usage
from ..memory.usage import ACTIVATIONS, KV_CACHE, UNUSED, WEIGHTS, MemoryUsage
from ..result.budgets import Key, budget_error, is_accelerator
from .items import Capacity, GroupPlacement, Item, assignment_of, item_of, tie_groups

Option = tuple[Key, Key]
"""Storage and execution device of a group."""


def options_of(item: Item, capacity: Capacity) -> list[Option]:
    """Return what may be done with a group: resident on each accelerator, streamed, or run on the CPU."""
    if not capacity.accelerators:
        return [(HOST, HOST), (DISK, HOST)]
    if item.pinned:
        return [(capacity.main, capacity.main)]
    found: list[Option] = [(key, key) for key in capacity.accelerators if item.may_take((key, key), capacity.main)]
    if item.can_stream:
        found += [(HOST, capacity.main), (DISK, capacity.main)]
    if capacity.host_compute and item.units:
        found += [(HOST, HOST), (DISK, HOST)]
    return found


class Filling:
    """Groups that are placed so far, and the bytes that they take on each device.

    Activations are kept free on the main device as soon as an accelerator runs anything, and on every other device that
    runs more than lookups.

    Args:
        items: all groups, in the order they run.
        capacity: the budgets.
    """

    def __init__(self, items: Sequence[Item], capacity: Capacity) -> None:
        self.items = items
        self.capacity = capacity
        self.usage = MemoryUsage(
            capacity.main, capacity.slots, capacity.staging_bytes, capacity.expert_cache, capacity.readers
        )
        self.options: dict[int, Option] = {}
        self._running: Counter[Key] = Counter()

    def add(self, index: int, option: Option) -> None:
        """Place group `index`, whether it fits or not."""
        self.add_all([index], option)

    def add_all(self, indices: Sequence[int], option: Option) -> None:
        """Place several groups alike, whether they fit or not."""
        items = [self.items[index] for index in indices]
        self.options.update(dict.fromkeys(indices, option))
        self._count(items, option, 1)
        if option[0] != option[1]:
            for unit, count in Counter([unit for item in items for unit in item.units]).items():
                self.usage.add_unit(unit, *option, count)

    def remove(self, index: int) -> None:
        """Take group `index` away again."""
        option = self.options.pop(index)
        self._count([self.items[index]], option, -1)
        for unit in self.items[index].units if option[0] != option[1] else ():
            self.usage.remove_unit(unit, *option)

    def try_add(self, index: int, option: Option) -> bool:
        """Place group `index` if it may be there, and if the devices that hold and run it stay within their budgets;
        return whether it is."""
        if not self.items[index].may_take(option, self.capacity.main):
            return False
        if option[0] == option[1]:
            fits = self._fits_resident(index, option[0])
            if fits:
                self.add(index, option)
            return fits
        self.add(index, option)
        if all(self.usage.excess(device, self.capacity.budgets) <= 0 for device in option):
            return True
        self.remove(index)
        return False

    def _fits_resident(self, index: int, device: Key) -> bool:
        """Whether a device keeps to its budget if group `index` is held and run there: nothing else changes on it."""
        item, activations = self.items[index], self.capacity.activations
        starts = not self._running[device] and bool(item.units or device == self.capacity.main)
        taken = item.stored_bytes((device, device)) + item.working + (activations if starts else 0)
        return self.usage.excess(device, self.capacity.budgets) + taken <= 0

    def runs(self, device: Key) -> bool:
        """Whether anything runs on a device, or needs it to run."""
        return bool(self._running[device])

    def fits(self) -> bool:
        """Whether every device keeps to its budget."""
        return not self.usage.over(self.capacity.budgets)

    def free_on_accelerators(self) -> int:
        """Return the bytes that are free on all accelerators together."""
        return sum(-self.usage.excess(key, self.capacity.budgets) for key in self.capacity.accelerators)

    def placement(self) -> GroupPlacement | None:
        """Return the placement of all groups with the slots it needs; None if a device passes its budget."""
        if not self.fits():
            return None
        options = [self.options[index] for index in range(len(self.items))]
        storage, execution = tuple(storage for storage, _ in options), tuple(execution for _, execution in options)
        main = self.capacity.main if any(map(is_accelerator, execution)) else HOST
        return GroupPlacement(storage, execution, main, self.usage.slots, self.usage.slot_bytes)

    def _count(self, items: Sequence[Item], option: Option, sign: int) -> None:
        (storage, execution), main = option, self.capacity.main
        self.usage.add(storage, WEIGHTS, sign * sum([item.stored_bytes(option) for item in items]))
        self.usage.add(execution, KV_CACHE, sign * sum([item.working for item in items]))
        self._run(execution, sign * sum([bool(item.units or execution == main) for item in items]))
        if execution != main and is_accelerator(execution):
            self._run(main, sign * len(items))

    def _run(self, device: Key, count: int) -> None:
        """Count what runs on a device, or needs it to run; a negative count takes it away."""
        before = self._running[device]
        self._running[device] = after = before + count
        if (before == 0) != (after == 0):
            self.usage.add(device, ACTIVATIONS, self.capacity.activations if after else -self.capacity.activations)


def filled(items: Sequence[Item], capacity: Capacity, placement: GroupPlacement) -> Filling:
    """Return the devices as a placement fills them."""
    filling = Filling(items, capacity)
    for index, option in enumerate(zip(placement.storage, placement.execution, strict=True)):
        filling.add(index, option)
    return filling


def into_ram(items: Sequence[Item], capacity: Capacity, placement: GroupPlacement) -> GroupPlacement | None:
    """Return a placement with groups in RAM that were on disk: as many as fit, in the order they run; None: none do."""
    filling = filled(items, capacity, placement)
    moved = False
    for index, (storage, execution) in enumerate(zip(placement.storage, placement.execution, strict=True)):
        if storage == DISK:
            filling.remove(index)
            fits = filling.try_add(index, (HOST, execution))
            moved = moved or fits
            if not fits:
                filling.add(index, (DISK, execution))
    return filling.placement() if moved else None


def fill_around(
    items: Sequence[Item], capacity: Capacity, away: Mapping[int, Key], order: Iterable[int]
) -> tuple[Filling, list[int]]:
    """Place groups on the accelerators in order, beside what others take there that are away.

    Args:
        items: all groups.
        capacity: the budgets.
        away: execution device of each group that is not resident on an accelerator; they are provisionally in RAM.
        order: the other groups, in the order they are placed. Pinned ones are placed first, on the main device; so are,
            beside other accelerators, those that may be on none of these.

    Returns:
        The devices as they are filled, and the groups that fit on no accelerator.
    """
    filling = Filling(items, capacity)
    for execution in dict.fromkeys(away.values()):
        filling.add_all([index for index, each in away.items() if each == execution], (HOST, execution))
    main, devices = capacity.main, len(capacity.accelerators)
    first: list[int] = []
    free: list[int] = []
    for index in order:
        (first if _needs_main(items[index], devices) else free).append(index)
    left = [index for index in first if not filling.try_add(index, (main, main))]
    resident = _Resident(filling)
    left += fill_in_order(free, devices, resident.try_add, lambda index: id(items[index]))
    resident.add_all()
    return filling, left


def _needs_main(item: Item, devices: int) -> bool:
    """Whether a group that is resident on one of several accelerators must be on the main device."""
    return item.pinned or (item.lends and devices > 1)


class _Resident:
    """Places groups that are held and run on one accelerator, as `Filling.try_add` does, but keeps the free bytes of
    each accelerator, and counts its groups together in the end.

    Args:
        filling: the accelerators so far. Nothing else is placed there before `add_all`.
    """

    def __init__(self, filling: Filling) -> None:
        capacity = filling.capacity
        self._filling, self._keys, self._main = filling, capacity.accelerators, capacity.main
        self._activations = capacity.activations
        self._free = {key: -filling.usage.excess(key, capacity.budgets) for key in self._keys}
        self._runs = {key: filling.runs(key) for key in self._keys}
        self._placed: dict[Key, list[int]] = {key: [] for key in self._keys}

    def try_add(self, index: int, at: int) -> bool:
        """Choose the accelerator number `at` for a group if that keeps to its budget; return whether it does."""
        item, key = self._filling.items[index], self._keys[at]
        starts = not self._runs[key] and bool(item.units or key == self._main)
        taken = item.stored_bytes((key, key)) + item.working + (self._activations if starts else 0)
        if taken > self._free[key] or not item.may_take((key, key), self._main):
            return False
        self._free[key] -= taken
        self._runs[key] = self._runs[key] or starts
        if not self._runs.get(self._main, True):  # it has to run what comes in between
            self._runs[self._main] = True
            self._free[self._main] -= self._activations
        self._placed[key].append(index)
        return True

    def add_all(self) -> None:
        """Place the groups on the accelerators that were chosen for them."""
        for key, placed in self._placed.items():
            if placed:
                self._filling.add_all(placed, (key, key))


def hold_away(filling: Filling, away: Iterable[int]) -> None:
    """Move groups that are provisionally in RAM to disk, the last first, until RAM keeps to its budget."""
    usage, budgets = filling.usage, filling.capacity.budgets
    on_disk = []
    for index in sorted(away, reverse=True):
        if usage.excess(HOST, budgets) <= 0:
            break
        option = filling.options[index]
        if filling.items[index].stored_bytes(option):
            _move(filling, index, DISK)
            on_disk.append(index)
    for index in reversed(on_disk):
        _move(filling, index, HOST)
        if usage.excess(HOST, budgets) > 0:
            _move(filling, index, DISK)


def _move(filling: Filling, index: int, storage: Key) -> None:
    _, execution = filling.options[index]
    filling.remove(index)
    filling.add(index, (storage, execution))


def fill_in_order(
    items: Iterable[int],
    devices: int,
    place: Callable[[int, int], bool],
    kind: Callable[[int], object] | None = None,
) -> list[int]:
    """Place items in order, keeping neighbours together, and return those that fit nowhere.

    An item goes to the current device, else to the next one that it fits, which becomes the current one. An item too
    large for every device from there on is passed over, so that one huge item does not push away all that follow it. In
    the end the items that were passed over are tried on every device.

    Args:
        items: in execution order.
        devices: how many devices there are, in the order they are filled.
        place: places an item on a device, by number, if it fits there; returns whether it did.
        kind: a value that is equal for equal items: where one does not fit, the others are not tried, as there is never
            more room later. None: all are tried.
    """
    current, passed = 0, []
    too_large: set[object] = set()  # kinds that fit no device from the current one on
    for item in items:
        own = None if kind is None else kind(item)
        if own not in too_large:
            for at in range(current, devices):
                if place(item, at):
                    current = at
                    break
            else:
                passed.append(item)
                if kind is not None:
                    too_large.add(own)
        else:
            passed.append(item)
    left: list[int] = []
    fit_nowhere: set[object] = set()
    for item in passed:
        own = None if kind is None else kind(item)
        if own not in fit_nowhere and any(place(item, at) for at in range(devices)):
            continue
        left.append(item)
        if kind is not None:
            fit_nowhere.add(own)
    return left


def place_greedily(items: Sequence[Item], capacity: Capacity) -> GroupPlacement | None:
    """Return the greedy placement, or None if the items cannot be placed under the budgets."""
    best = place_away(items, capacity, {}) if capacity.accelerators else None
    if best is not None:
        return best
    # Nothing is streamed first, then ever larger groups.
    slot_sizes = {item.slot_bytes for item in items if item.can_stream} | {0}
    for slot_bytes in sorted(slot_sizes) if capacity.accelerators else ():
        placement = _place_with_slots(items, capacity, slot_bytes)
        if placement is not None and (best is None or _score(items, placement) > _score(items, best)):
            best = placement
        if best is not None and all(map(is_accelerator, best.storage)):
            return best
    return best or place_away(items, capacity, dict.fromkeys(range(len(items)), HOST))


def may_hold(items: Sequence[Item], capacity: Capacity, stay: Iterable[int]) -> bool:
    """Return whether the accelerators have as many bytes as the weights of the groups that `stay` on them."""
    room = sum([capacity.budgets[key] for key in capacity.accelerators])
    return sum([items[index].weights for index in stay]) <= room


def place_away(items: Sequence[Item], capacity: Capacity, away: Mapping[int, Key]) -> GroupPlacement | None:
    """Return the placement with some groups off the accelerators and all others on them; None if that does not fit.

    Args:
        items: all groups.
        capacity: the budgets.
        away: the groups off the accelerators, with the device that runs each.
    """
    filling, left = fill_around(items, capacity, away, (i for i in range(len(items)) if i not in away))
    return None if left else _with_away_held(filling, away)


def _with_away_held(filling: Filling, away: Mapping[int, Key]) -> GroupPlacement | None:
    hold_away(filling, away)
    return filling.placement()


def _score(items: Sequence[Item], placement: GroupPlacement) -> tuple[int, int]:
    """Return the bytes that run on accelerators, then the bytes resident there: the more the better."""
    run = sum(it.weights for it, key in zip(items, placement.execution, strict=True) if is_accelerator(key))
    resident = sum(it.weights for it, key in zip(items, placement.storage, strict=True) if is_accelerator(key))
    return run, resident


def _place_with_slots(items: Sequence[Item], capacity: Capacity, slot_bytes: int) -> GroupPlacement | None:
    """Return the placement in which no slot is larger than `slot_bytes`; None if there is none.

    The groups that do not fit the accelerators leave them, which takes slots there, until all others fit.
    """
    streamable = [item.can_stream and item.slot_bytes <= slot_bytes for item in items]
    order = sorted(range(len(items)), key=streamable.__getitem__)  # what cannot be streamed is placed first
    if not (capacity.host_compute or may_hold(items, capacity, (index for index in order if not streamable[index]))):
        return None
    away: dict[int, Key] = {}
    while True:
        filling, left = fill_around(items, capacity, away, (index for index in order if index not in away))
        if not left:
            return _with_away_held(filling, away)
        if any(items[i].pinned or not (streamable[i] or capacity.host_compute) for i in left):
            return None
        away.update({index: capacity.main if streamable[index] else HOST for index in left})


def balanced_caps(
    costs: Sequence[int],
    capacities: Sequence[int],
    low_zero: bool = False,
    fixed: Collection[int] = (),
    main: int = 0,
) -> list[int]:
    """Return caps, none above its capacity, under which filling in order is most even.

    Args:
        costs: bytes of each item, in execution order.
        capacities: bytes of each device, in the order they are filled.
        low_zero: the first device takes only what does not fit the others.
        fixed: positions of the items that must be on the main device. They are placed first.
        main: position of that device.

    Returns:
        The capacities themselves when the items do not all fit.
    """
    free = [cost for index, cost in enumerate(costs) if index not in fixed]
    held = sum(costs) - sum(free)

    def fit(caps: Sequence[int], placed: Callable[[Sequence[int], Sequence[int]], bool]) -> bool:
        left = [cap - held if at == main else cap for at, cap in enumerate(caps)]
        return left[main] >= 0 and placed(free, left)

    if not fit(capacities, _all_fit):
        return list(capacities)
    # An item that is passed over lies on an earlier device than the one before it, which a pass then comes back to.
    placed = _fit_in_order if fit(capacities, _fit_in_order) else _all_fit
    if low_zero and len(capacities) > 1:
        first = _smallest(capacities[0], lambda cap: fit([cap, *capacities[1:]], placed))
        rest = _smallest(max(capacities[1:]), lambda cap: fit([first, *(min(cap, c) for c in capacities[1:])], placed))
        return [first, *(min(rest, capacity) for capacity in capacities[1:])]
    cap = _smallest(max(capacities), lambda cap: fit([min(cap, c) for c in capacities], placed))
    return [min(cap, capacity) for capacity in capacities]


def _all_fit(costs: Sequence[int], capacities: Sequence[int]) -> bool:
    free = list(capacities)

    def place(item: int, device: int) -> bool:
        if costs[item] > free[device]:
            return False
        free[device] -= costs[item]
        return True

    return not fill_in_order(range(len(costs)), len(free), place)


def _fit_in_order(costs: Sequence[int], capacities: Sequence[int]) -> bool:
    """Whether all items fit if none is on an earlier device than the one before it."""
    free, at = list(capacities), 0
    for cost in costs:
        while at < len(free) and cost > free[at]:
            at += 1
        if at == len(free):
            return False
        free[at] -= cost
    return True


def _smallest(high: int, enough: Callable[[int], bool]) -> int:
    """Return the smallest value that is `enough`; `high` is enough."""
    return bisect_left(range(high), True, key=enough)


ATTEMPTS = 4
"""Maximum number of attempts with ever lower budgets."""

ATTEMPTS_IN_SEGMENTS = 6
"""The same where allocators cache: what they reserve changes by whole segments."""


class Attempt(NamedTuple):
    """The memory usage of an attempted placement that is over budgets by some bytes, or by none.

    `counted` is the usage that the placement was chosen by, which knows no transfers between devices.
    """

    usage: MemoryUsage
    counted: MemoryUsage
    over: Mapping[Key, int]


def repeat_until_within(
    budgets: Mapping[Key, int], attempt: Callable[[Mapping[Key, int]], Attempt | None], attempts: int = ATTEMPTS
) -> bool:
    """Repeat an attempt with budgets lowered by its excess, and return whether the last one kept to them.

    Args:
        budgets: bytes by device key.
        attempt: places under the budgets it is given; None if nothing fits.
        attempts: how many are made at most.
    """
    lowered = dict(budgets)
    for turn in range(attempts):
        made = attempt(lowered)
        if made is None:
            return False
        if not made.over:
            return True
        for key, excess in made.over.items():
            lowered[key] = _lowered(lowered.get(key, 0), made, key, excess)
            if turn == attempts - 2 and made.usage.of(key, UNUSED):
                lowered[key] = 0  # it may not have a segment for anything
    return False


def _lowered(budget: int, made: Attempt, device: Key, excess: int) -> int:
    """Return the budget lowered by the excess, and under which the same placement is not chosen again."""
    step = _step(made.usage, device, excess)
    found, counted = min(budget, made.usage.tensors(device)) - step, made.counted.tensors(device)
    return max(found if found < counted else counted - step, 0)


def _step(usage: MemoryUsage, device: Key, excess: int) -> int:
    """Return the bytes by which to lower a budget: the excess, but where whole segments are reserved no more than a
    third of the tensors, since a segment more or less may take few of them."""
    in_segments = usage.of(device, UNUSED) > 0
    return min(excess, max(usage.tensors(device) // 3, 1)) if in_segments else excess


def attempts_of(capacity: Capacity) -> int:
    """Return how many attempts are made under budgets."""
    return ATTEMPTS_IN_SEGMENTS if capacity.caching else ATTEMPTS


def greedy_assignment(
    profile: Profile, capacity: Capacity, strategy: str, stream_buffers: bool, streams: bool = True
) -> Assignment:
    """Return the greedy placement of a profile, or one balanced over the accelerators.

    Args:
        profile: the model.
        capacity: the budgets; without a main device, that is the first accelerator on which anything can run.
        strategy: one of `STRATEGIES`.
        stream_buffers: buffers lie with the weights, and not where the unit runs.
        streams: False: the host computes everything that is not resident.

    Raises:
        BudgetError: nothing fits; the message names budgets that would do.
    """
    groups = tie_groups(profile.units)
    items = [item_of(group, profile, stream_buffers, streams) for group in groups]

    def attempt(budgets: Mapping[Key, int]) -> Assignment | None:
        best: Assignment | None = None
        for main in _mains(capacity, budgets):
            found = attempt_with(main, budgets)
            if found is not None and any(map(is_accelerator, found.execution)):
                return found
            best = best or found
        return best

    def attempt_with(main: Key | None, budgets: Mapping[Key, int]) -> Assignment | None:
        found: Assignment | None = None

        def place(lowered: Mapping[Key, int]) -> Attempt | None:
            nonlocal found
            narrowed = replace(capacity, budgets=lowered, main_device=main)
            placement = place_greedily(items, replace(narrowed, budgets=_capped(items, narrowed, strategy)))
            if placement is None:
                return None
            found = assignment_of(profile, groups, placement, stream_buffers, capacity)
            found = replace(found, limits=budgets) if capacity.caching else found
            usage = memory_usage(profile, found)
            return Attempt(usage, filled(items, narrowed, placement).usage, usage.over(budgets))

        return found if repeat_until_within(budgets, place, attempts_of(capacity)) else None

    found = attempt(capacity.budgets)
    if found is None:
        enough = (
            sum(item.nbytes + capacity.slots * (item.slot_bytes if streams else 0) for item in items)
            + 2 * capacity.activations
        )
        if capacity.caching:
            enough = 2 * enough + max(memory.workspace for memory in capacity.caching.values()) + 2 * LARGE_SEGMENT
        raise budget_error(capacity.budgets, enough, lambda budgets: attempt(budgets) is not None)
    return found


def least_resident(profile: Profile, capacity: Capacity, stream_buffers: bool) -> Assignment | None:
    """Return the placement that takes least of the accelerators: all that can be is streamed, through one slot.

    Args:
        profile: the model.
        capacity: the budgets; without a main device, that is the accelerator with the largest one.
        stream_buffers: buffers lie with the weights, and not where the unit runs.

    Returns:
        None if there is no accelerator to stream to, or too small a one.
    """
    main = capacity.main_device
    if main is None:
        main = max(capacity.accelerators, key=capacity.budgets.__getitem__, default=HOST)
    if not is_accelerator(main):
        return None
    narrowed = replace(capacity, main_device=main, slots=1)
    groups = tie_groups(profile.units)
    items = [item_of(group, profile, stream_buffers) for group in groups]
    away = {index: main for index, item in enumerate(items) if item.can_stream and not item.pinned}
    placement = place_away(items, narrowed, away)
    return None if placement is None else assignment_of(profile, groups, placement, stream_buffers, narrowed)


def _mains(capacity: Capacity, budgets: Mapping[Key, int]) -> list[Key | None]:
    """Return the main devices to try in turn: the first accelerator may be too small where another is not."""
    if capacity.main_device is not None:
        return [capacity.main_device]
    return [*replace(capacity, budgets=budgets).accelerators] or [None]


def _capped(items: Sequence[Item], capacity: Capacity, strategy: str) -> dict[Key, int]:
    """Return the budgets, the accelerators' lowered so that filling them in order is balanced."""
    budgets = dict(capacity.budgets)
    keys = capacity.accelerators
    if strategy not in ("balanced", "balanced_low_0") or len(keys) < 2:
        return budgets
    capacities = [max(budgets[key] - capacity.activations, 0) for key in keys]
    fixed = [index for index, item in enumerate(items) if _needs_main(item, len(keys))] if capacity.main in keys else []
    main = keys.index(capacity.main) if fixed else 0
    caps = balanced_caps([item.nbytes for item in items], capacities, strategy == "balanced_low_0", fixed, main)
    if caps != capacities:
        budgets.update({key: cap + capacity.activations for key, cap in zip(keys, caps, strict=True)})
    return budgets
