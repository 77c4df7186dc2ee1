"""Traces of routers: distinct experts, popular ones, and those of the token before."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch

from bigmodel.benchmarks.router_traces import (
    CANDIDATES,
    LOCAL,
    UNIFORM,
    Habits,
    Trace,
    draw_trace,
    following,
    hits_of,
    typical_trace,
)
from bigmodel.dispatch import dispatch_model
from tests.dispatch.mixtures import EXPERT_BYTES, LAYERS, chosen_by, mixtral


def repeated(trace: Trace) -> float:
    """The share of experts that were also those of the token before."""
    pairs = [(set(a), set(b)) for layer in trace for a, b in pairwise(layer)]
    return sum(len(a & b) for a, b in pairs) / sum(len(b) for _, b in pairs)


def test_a_token_has_distinct_experts() -> None:
    trace = draw_trace(2, 8, 3, 50, LOCAL)
    assert [len(layer) for layer in trace] == [50, 50]
    assert all(len(set(chosen)) == 3 and set(chosen) <= set(range(8)) for layer in trace for chosen in layer)


def test_uniform_routers_repeat_by_chance_alone() -> None:
    assert repeated(draw_trace(4, 16, 4, 500, UNIFORM)) == pytest.approx(4 / 16, abs=0.02)


def test_routers_with_habits_repeat_more_and_have_favourites() -> None:
    trace = draw_trace(4, 16, 4, 500, Habits(repeat=0.5))
    assert repeated(trace) > 0.5
    counts = Counter(each for chosen in draw_trace(1, 16, 4, 500, Habits(skew=1.0))[0] for each in chosen)
    assert counts.most_common()[0][1] > 3 * counts.most_common()[-1][1]


def test_a_seed_gives_the_same_trace() -> None:
    assert draw_trace(2, 8, 2, 20, LOCAL, seed=3) == draw_trace(2, 8, 2, 20, LOCAL, seed=3)
    assert draw_trace(2, 8, 2, 20, LOCAL, seed=3) != draw_trace(2, 8, 2, 20, LOCAL, seed=4)


def test_more_experts_than_there_are_cannot_be_chosen() -> None:
    with pytest.raises(ValueError, match="9 of 8 experts"):
        draw_trace(1, 8, 9, 1, UNIFORM)


@pytest.mark.usefixtures("accelerators")
def test_hits_are_those_of_a_dispatched_model() -> None:
    trace, slots = draw_trace(LAYERS, 8, 2, 16, LOCAL), 5
    model = dispatch_model(mixtral(), {"": "cpu"}, main_device=0, expert_cache=slots * EXPERT_BYTES)
    token, hits = torch.ones(1, 1, dtype=torch.long), []
    with following(model, trace), torch.no_grad():
        for _ in range(16):
            model(token)
            hits.append(model.dispatch_stats()["experts"]["virtual:0"]["hits"])
    assert hits_of(trace, slots) == hits[-1] > 0
    assert hits_of(trace, slots, after=6) == hits[-1] - hits[5]


def test_a_typical_trace_has_about_as_many_hits_as_the_mean() -> None:
    draw = partial(draw_trace, 2, 16, 4, 12, LOCAL)
    hits = [hits_of(draw(seed), 8, 6) for seed in range(CANDIDATES, 2 * CANDIDATES)]
    found = typical_trace(draw, 8, 6, seed=1)
    assert found in [draw(seed) for seed in range(CANDIDATES, 2 * CANDIDATES)]
    mean = sum(hits) / CANDIDATES
    assert abs(hits_of(found, 8, 6) - mean) == min(abs(each - mean) for each in hits)


def test_the_routers_of_a_model_follow_a_trace_token_by_token() -> None:
    trace = draw_trace(LAYERS, 8, 2, 2, UNIFORM)
    model = mixtral()
    token = torch.ones(1, 1, dtype=torch.long)
    with following(model, trace):
        seen = chosen_by(model, token, token, token)
    assert [sorted(each) for each in seen] == [trace[layer][turn % 2] for turn in range(3) for layer in range(LAYERS)]
    assert [set(each) for each in chosen_by(model, token)] == [set(each) for each in chosen_by(mixtral(), token)]
