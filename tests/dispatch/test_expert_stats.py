"""Counters of expert caches, together by device."""

from __future__ import annotations

import torch

from bigmodel.dispatch.expert_cache import ExpertCache
from bigmodel.dispatch.expert_stats import expert_stats

from .test_expert_layer import layer


def test_caches_of_one_device_are_counted_together() -> None:
    made = [layer(), layer(rows=8)]
    caches = [ExpertCache(torch.device("cpu"), [one], 4 * one.layout.nbytes) for one in made]
    for one, cache in zip(made, caches):
        for _ in range(2):
            cache.visit(one, [0, 2])
            cache.use(one, [0, 2], lambda held: held)
    found = expert_stats(caches)
    assert set(found) == {"cpu"}
    counters = found["cpu"]
    assert (counters["hits"], counters["misses"], counters["fetches"]) == (4, 4, 4)
    assert counters["hit_rate"] == 0.5
    assert counters["bytes_fetched"] == 2 * sum(one.expert_bytes for one in made)
    assert counters["cache_bytes"] == sum(cache.nbytes for cache in caches)


def test_no_caches_have_nothing_to_tell() -> None:
    assert expert_stats([]) == {}
