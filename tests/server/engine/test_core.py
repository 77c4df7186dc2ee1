"""Turns of the engine without its thread: what waits is computed, what ends frees what it held."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bigmodel.server.engine import Done, EngineOptions, Failed, build_engine
from bigmodel.server.engine.attention import PROMPT_BLOCK
from bigmodel.server.engine.core import EngineCore
from tests.server import oracle
from tests.server.tiny import Collector, make_request, tiny_model, tiny_tokenizer


def core(**options: Any) -> EngineCore:
    options = {"kv_bytes": 64 << 20, "max_sequences": 2, "prefix_cache": False, **options}
    return build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(**options)).core


def put(core: EngineCore, prompt: str = "the cat", **params: Any) -> Collector:
    """Hand a request in; where its events arrive."""
    request = make_request(prompt, **{"ignore_eos": True, **params})
    core.add(request)
    assert isinstance(request.sink, Collector)
    return request.sink


def run(core: EngineCore) -> int:
    """Step until nothing is left to do; how many steps that took."""
    steps = 0
    while not core.idle:
        assert core.step()
        steps += 1
    return steps


def test_without_requests_there_is_nothing_to_compute() -> None:
    idle = core()
    assert idle.idle
    assert not idle.step()
    assert idle.steps == 0


def test_more_requests_than_run_at_once_take_turns_and_get_the_tokens_they_would_alone() -> None:
    shared = core()
    asked = [put(shared, prompt, max_tokens=4, temperature=0) for prompt in ("the cat", "in the", "then")]
    assert run(shared) == 8  # two at once, then the third
    for collector, prompt in zip(asked, ("the cat", "in the", "then"), strict=True):
        assert isinstance(collector.wait(), Done)
        tokens = tiny_tokenizer().encode(prompt)
        params = make_request(prompt, max_tokens=4, temperature=0, ignore_eos=True).params
        assert collector.tokens() == oracle.generate(tiny_model(), tiny_tokenizer(), tokens, params)
    assert (shared.counts.generated, shared.steps) == (12, 8)


def test_done_counts_every_choice() -> None:
    shared = core()
    collector = put(shared, n=2, max_tokens=3)
    run(shared)
    assert collector.wait() == Done(len(tiny_tokenizer().encode("the cat")), 6, 0)


def test_only_what_was_kept_before_it_came_counts_as_cached() -> None:
    shared = core(prefix_cache=True)
    prompt = "in the cat " * 40
    for cached in (0, len(tiny_tokenizer().encode(prompt)) // PROMPT_BLOCK * PROMPT_BLOCK):
        collector = put(shared, prompt, n=2, max_tokens=2)
        run(shared)
        done = collector.wait()
        assert isinstance(done, Done)
        assert done.cached_tokens == cached


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_that_is_failed_frees_what_it_held(steps: int) -> None:
    shared = core()
    collector = put(shared, max_tokens=50)
    (request,) = shared.requests.values()
    for _ in range(steps):
        shared.step()
    shared.fail(request, "cancelled", "nobody waits")
    assert collector.wait() == Failed("cancelled", "nobody waits")
    assert shared.idle
    assert shared.scheduler.pool.used == 0
    shared.fail(request, "cancelled", "again")  # of no effect
    assert not shared.step()


def test_what_is_late_ends_and_the_rest_goes_on() -> None:
    shared = core()
    late, timely = put(shared, deadline=time.monotonic() + 5), put(shared, max_tokens=2)
    shared.expire(time.monotonic() + 6)
    failed = late.wait()
    assert isinstance(failed, Failed)
    assert failed.kind == "timeout"
    run(shared)
    assert isinstance(timely.wait(), Done)
