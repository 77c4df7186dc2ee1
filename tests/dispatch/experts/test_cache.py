"""The expert cache without modules: what it holds, fetches and gives up, and its counters by device."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bigmodel.dispatch.experts.cache import Chosen, ExpertCache, expert_stats
from bigmodel.dispatch.experts.layer import ExpertLayer
from bigmodel.dispatch.weights.block import HostTensor

from ...accelerators import at, held
from ...examples import every
from ..interrupting import interrupted_at
from .test_layer import layer

EXPERT = 512
"""Bytes of one expert."""

pytestmark = pytest.mark.usefixtures("every_accelerator")


def layers(count: int = 2, experts: int = 4) -> list[ExpertLayer]:
    """Return layers whose expert e of layer n is filled with 10 n + e."""
    made = []
    for number in range(count):
        values = torch.arange(experts).float().add(10 * number).view(-1, 1, 1).expand(-1, 8, 16).contiguous()
        made.append(ExpertLayer(str(number), {"w": HostTensor(values, torch.float32, [({"w": values}, "w")])}))
    return made


def cache_of(made: list[ExpertLayer], slots: int) -> ExpertCache:
    return ExpertCache(torch.device(at(0)), made, slots)


def acquired(cache: ExpertCache, layer: ExpertLayer, experts: list[int], **options: Any) -> list[int]:
    """Return the slots that hold `experts` from now on."""
    held: list[int] = []
    cache.acquire(layer, experts, held, **options)
    return held


def content(cache: ExpertCache, slots: list[int]) -> list[float]:
    return [cache.rows["w"][slot].cpu().unique().item() for slot in slots]


def visit(cache: ExpertCache, layer: ExpertLayer, experts: list[int]) -> list[float]:
    """Use experts as a forward would; return what was in their slots."""
    cache.record(layer, experts)
    return cache.visit(Chosen(layer, experts), lambda slots: content(cache, slots))


def test_experts_are_in_the_slots_that_are_handed_out() -> None:
    first, second = made = layers()
    cache = cache_of(made, slots=3)
    assert visit(cache, first, [0, 2]) == [0, 2]
    assert visit(cache, second, [1, 3, 0]) == [11, 13, 10]
    assert visit(cache, first, [2, 1]) == [2, 1]


def test_device_memory_is_the_budget_and_never_more() -> None:
    made = layers()
    cache = cache_of(made, slots=3)
    assert cache.nbytes == held(0) == 3 * EXPERT
    for _ in range(5):
        for visited in made:
            visit(cache, visited, [0, 1, 3])
            assert held(0) == 3 * EXPERT


def test_slots_are_at_least_one_and_at_most_the_experts() -> None:
    made = layers()
    assert cache_of(made, slots=0).slots == 1
    assert cache_of(made, slots=100).slots == 8


def test_hits_misses_and_bytes_are_counted() -> None:
    first, second = made = layers()
    cache = cache_of(made, slots=4)
    visit(cache, first, [0, 1])
    visit(cache, second, [2])
    visit(cache, first, [1, 3])
    counters = expert_stats([cache])[at(0)]
    assert (counters["hits"], counters["misses"], counters["fetches"]) == (1, 4, 4)
    assert counters["bytes_fetched"] == counters["bytes_from_ram"] == 4 * EXPERT
    assert counters["cache_bytes"] == 4 * EXPERT
    assert counters["hit_rate"] == pytest.approx(0.2)


def test_reuse_is_the_share_of_hits_beyond_chance() -> None:
    first, second = made = layers()
    cache = cache_of(made, slots=4)  # half of the experts
    for _ in range(4):
        visit(cache, first, [0, 1])
    assert expert_stats([cache])[at(0)]["reuse"] == pytest.approx((6 - 8 / 2) / (8 - 8 / 2))
    visit(cache, second, [2, 3])
    visit(cache, second, [0, 1])
    assert expert_stats([cache])[at(0)]["reuse"] == 0.0


def test_a_cache_of_all_experts_shows_no_reuse() -> None:
    made = layers()
    cache = cache_of(made, slots=8)
    for _ in range(2):
        visit(cache, made[0], [0, 1])
    assert expert_stats([cache])[at(0)]["reuse"] == 0.0


def test_held_experts_are_not_overwritten() -> None:
    first, second = made = layers()
    cache = cache_of(made, slots=2)
    held = acquired(cache, first, [0])
    for expert in range(4):
        assert visit(cache, second, [expert]) == [10 + expert]
    assert content(cache, held) == [0]
    cache.release(held)


def test_without_room_it_says_so_or_waits() -> None:
    first, second = made = layers()
    cache = cache_of(made, slots=2)
    held = acquired(cache, first, [0, 1])
    assert acquired(cache, second, [0], wait=False) == []
    found: list[float] = []
    waiting = threading.Thread(target=lambda: found.extend(visit(cache, second, [3])))
    waiting.start()
    cache.release(held)
    waiting.join(timeout=30)
    assert found == [13]


def test_experts_wanted_soon_are_overwritten_last() -> None:
    (layer,) = made = layers(count=1)
    cache = cache_of(made, slots=2)
    visit(cache, layer, [0, 1])
    cache.record(layer, [1, 2])
    cache.release(acquired(cache, layer, [2], soon=[1]))
    cache.stats.reset()
    assert visit(cache, layer, [1]) == [1]
    assert cache.stats.fetches == 0


def test_fetched_ahead_is_a_hit_later_and_never_takes_what_is_in_use() -> None:
    first, second = made = layers()
    cache = cache_of(made, slots=3)
    held = acquired(cache, first, [0])
    cache.fetch_ahead(second, [0, 1, 2, 3])
    assert content(cache, held) == [0]
    cache.release(held)
    assert visit(cache, second, [0, 1]) == [10, 11]
    assert cache.stats.hits == 2


def test_changed_weights_are_fetched_again() -> None:
    (layer,) = made = layers(count=1)
    cache = cache_of(made, slots=4)
    visit(cache, layer, [0, 1])
    layer.fused.tensors[0].value[1] = 7
    assert visit(cache, layer, [0, 1]) == [0, 7]


def test_a_failed_fetch_is_raised_and_nothing_stays_held(monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = made = layers(count=1)
    cache = cache_of(made, slots=2)
    block = layer.block(1)

    def broken(memory: torch.Tensor) -> None:
        raise OSError("cannot be read")

    with monkeypatch.context() as patched:
        patched.setattr(block, "fetch", broken)
        for _ in range(3):
            with pytest.raises(OSError, match="cannot be read"):
                acquired(cache, layer, [0, 1])
            assert cache.in_use == 0
    assert visit(cache, layer, [1, 3]) == [1, 3]


def test_the_layers_follow_each_other_in_a_circle() -> None:
    first, second, third = made = layers(count=3)
    cache = cache_of(made, slots=1)
    assert [cache.following(layer) for layer in made] == [second, third, first]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts in finalizers
def test_an_interrupt_at_any_moment_leaves_no_slot_in_use() -> None:
    first, second = made = layers()
    cache = cache_of(made, slots=3)

    def use_both() -> None:
        visit(cache, first, [0, 2])
        cache.fetch_ahead(second, [1])
        visit(cache, second, [1, 3])

    number = 0
    while interrupted_at(number, use_both, within="/bigmodel/"):
        assert cache.in_use == 0, number
        number += every(2)
    assert number > 100
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.append(visit(cache, first, [1, 3, 0]) == [1, 3, 0]))
    other.start()
    other.join(timeout=30)
    assert free == [True], "no lock is left behind either"


def test_caches_of_one_device_are_counted_together() -> None:
    made = [layer(), layer(rows=8)]
    caches = [ExpertCache(torch.device("cpu"), [one], 4) for one in made]
    for one, cache in zip(made, caches):
        for _ in range(2):
            cache.record(one, [0, 2])
            cache.visit(Chosen(one, [0, 2]), lambda held: held)
    found = expert_stats(caches)
    assert set(found) == {"cpu"}
    counters = found["cpu"]
    assert (counters["hits"], counters["misses"], counters["fetches"]) == (4, 4, 4)
    assert counters["hit_rate"] == 0.5
    assert counters["bytes_fetched"] == 2 * sum(one.expert_bytes for one in made)
    assert counters["cache_bytes"] == sum(cache.nbytes for cache in caches)


def test_no_caches_have_nothing_to_tell() -> None:
    assert expert_stats([]) == {}
