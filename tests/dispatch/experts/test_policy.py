"""What to give up: measured in hits, against the least recently used and against perfect foresight."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from bigmodel.dispatch.experts.policy import ExpertPolicy

from ...examples import alike

LAYERS, EXPERTS, PER_TOKEN = 8, 32, 4
Key = tuple[int, int]
Trace = list[tuple[int, list[int]]]


def trace(skew: float, repeats: float, rounds: int = 120) -> Trace:
    """Return what routers choose that favour some experts (Zipf's law to the power `skew`) and repeat themselves."""
    random = np.random.default_rng(1)
    favours = np.array([random.permutation(1 / np.arange(1, EXPERTS + 1) ** skew) for _ in range(LAYERS)])
    favours /= favours.sum(axis=1, keepdims=True)
    last: list[list[int]] = [[] for _ in range(LAYERS)]
    visits = []
    for _ in range(rounds):
        for layer in range(LAYERS):
            chosen = [expert for expert in last[layer] if random.random() < repeats]
            while len(chosen) < PER_TOKEN:
                expert = int(random.choice(EXPERTS, p=favours[layer]))
                chosen += [expert] if expert not in chosen else []
            last[layer] = sorted(chosen)
            visits.append((layer, last[layer]))
    return visits


def hits_of_policy(visits: Trace, room: int) -> int:
    policy, held, hits = ExpertPolicy(LAYERS, EXPERTS), set[Key](), 0
    for layer, chosen in visits:
        policy.visit(layer, chosen)
        wanted = {(layer, expert) for expert in chosen}
        hits += len(wanted & held)
        for key in sorted(wanted - held):
            if len(held) >= room:
                others = sorted(held - wanted)
                waits = policy.waits(*np.array(others).T)
                held.remove(others[int(waits.argmax())])
            held.add(key)
    return hits


def hits_of_lru(visits: Trace, room: int) -> int:
    held, hits = OrderedDict[Key, None](), 0
    for layer, chosen in visits:
        for key in [(layer, expert) for expert in chosen]:
            hits += key in held
            held[key] = None
            held.move_to_end(key)
            if len(held) > room:
                held.popitem(last=False)
    return hits


def hits_of_foresight(visits: Trace, room: int) -> int:
    """Belady's rule: give up what is wanted again last of all."""
    keys = [(layer, expert) for layer, chosen in visits for expert in chosen]
    again, seen = [0] * len(keys), dict[Key, int]()
    for position in reversed(range(len(keys))):
        again[position] = seen.get(keys[position], len(keys))
        seen[keys[position]] = position
    held, hits = dict[Key, int](), 0
    for position, key in enumerate(keys):
        hits += key in held
        if key not in held and len(held) >= room:
            del held[max(held, key=held.__getitem__)]
        held[key] = again[position]
    return hits


@pytest.mark.slow
@alike("room", [64, 16, 128], first=2)
@alike(("skew", "repeats"), [(0.0, 0.0), (0.8, 0.3), (1.2, 0.5), (0.0, 0.3), (0.8, 0.0)], first=3)
def test_hits_are_at_least_those_of_least_recently_used_and_at_most_those_of_foresight(
    skew: float, repeats: float, room: int
) -> None:
    visits = trace(skew, repeats)
    hits = hits_of_policy(visits, room)
    assert 0.99 * hits_of_lru(visits, room) <= hits <= hits_of_foresight(visits, room)


@pytest.mark.slow
def test_where_a_round_uses_more_than_there_is_room_for_the_least_recently_used_never_hits_and_this_does() -> None:
    visits = trace(skew=1.2, repeats=0.5)
    assert hits_of_lru(visits, room=16) == 0
    assert hits_of_policy(visits, room=16) > len(visits) * PER_TOKEN // 5


def test_the_layer_just_visited_is_wanted_last() -> None:
    policy = ExpertPolicy(layers=3, experts=2)
    policy.visit(1, [])
    waits = policy.waits(np.array([0, 1, 2]), np.array([0, 0, 0]))
    assert waits[2] < waits[0] < waits[1]


def test_experts_chosen_often_are_wanted_sooner() -> None:
    policy = ExpertPolicy(layers=1, experts=3)
    for turn in range(20):
        policy.visit(0, [0] if turn % 4 else [0, 1])
    waits = policy.waits(np.array([0, 0, 0]), np.array([0, 1, 2]))
    assert waits[0] < waits[1] < waits[2]
