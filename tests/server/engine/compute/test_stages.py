"""Packed steps over stages in threads, that have the tokens of one engine over the whole model."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bigmodel.nodes.stages import RunningStage
from bigmodel.profile.model.stage import cut_stage
from bigmodel.server.engine import Engine, EngineOptions, build_engine
from bigmodel.server.engine.compute.runner import PackedRunner
from bigmodel.server.engine.compute.stages import PackedCaches
from tests.examples import alike
from tests.server.tiny import ask, tiny_engine, tiny_model, tiny_tokenizer

PROMPTS = ("the cat sat on the mat " * 8, "a", "in the beginning")


class ThreadPeer:
    """A stage in another thread."""

    def __init__(self, inbox: queue.SimpleQueue[Any], outbox: queue.SimpleQueue[Any]) -> None:
        self._inbox, self._outbox = inbox, outbox

    def send(self, values: Any, tensors: dict[str, torch.Tensor]) -> None:
        self._outbox.put((dict(values), {name: tensor.clone() for name, tensor in tensors.items()}))

    def receive(self) -> Any:
        return self._inbox.get(timeout=60)

    def close(self) -> None:
        pass


@contextmanager
def over_stages(model: Any, cuts: tuple[int, ...], **options: Any) -> Iterator[tuple[Engine, list[PackedCaches]]]:
    """A started engine over stages of the model that end before these layers, and the caches of those that follow."""
    bounds = [0, *cuts, model.config.num_hidden_layers]
    count = len(bounds) - 1
    ways: list[Any] = [queue.SimpleQueue() for _ in range(count + 1)]  # to each stage, and the logits to the first
    stages: list[RunningStage] = []
    for at in range(count):
        cut = cut_stage(copy.deepcopy(model), bounds[at], bounds[at + 1]).eval()
        if at:
            PackedRunner(cut, row_multiple=8, host_linear="torch")
        before: Any = ThreadPeer(ways[at], ways[0]) if at else None
        behind: Any = ThreadPeer(ways[0], ways[at + 1]) if at < count - 1 else None
        ends: Any = ThreadPeer(ways[count], ways[count]) if at in (0, count - 1) else None
        stages.append(RunningStage(cut, bounds[at], bounds[at + 1], before, behind, ends, PackedCaches()))

    def follow(stage: RunningStage) -> None:
        with torch.inference_mode():
            stage.follow()

    threads = [threading.Thread(target=follow, args=(stage,), daemon=True) for stage in stages[1:]]
    for thread in threads:
        thread.start()
    limits: Any = {"kv_bytes": 64 << 20, "row_multiple": 8, "host_linear": "torch", "prefix_cache": False}
    engine = build_engine(stages[0].model, tiny_tokenizer(), options=EngineOptions(**{**limits, **options}))
    engine.start()
    try:
        yield engine, [stage.caches for stage in stages[1:]]  # type: ignore[misc]
    finally:
        engine.stop()
        stages[0].stop_others()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def answered(engine: Engine, **params: Any) -> list[list[int]]:
    """Tokens of all prompts, asked at once."""
    asked = [ask(engine, prompt, max_tokens=20, temperature=0.0, **params) for prompt in PROMPTS]
    for each in asked:
        each.wait()
    return [each.tokens() for each in asked]


@pytest.mark.slow
@alike("cuts", [(1,), (1, 3)], first=1)
def test_a_batch_over_stages_has_the_tokens_of_one_process(cuts: tuple[int, ...]) -> None:
    model = tiny_model(layers=4)
    whole = tiny_engine(copy.deepcopy(model), row_multiple=8, host_linear="torch")
    expected = answered(whole, logprobs=2)
    whole.stop()
    with over_stages(model, cuts) as (engine, caches):
        assert engine.core.runner.name == "packed"
        assert answered(engine, logprobs=2) == expected
        assert answered(engine, logprobs=2) == expected
        assert all(len(each.kept) <= len(PROMPTS) + 1 for each in caches)  # those of ended sequences are dropped


@pytest.mark.slow
def test_proposed_tokens_are_verified_over_stages() -> None:
    model = tiny_model(layers=2)
    with over_stages(model, (1,)) as (engine, _):
        expected = answered(engine)
    with over_stages(model, (1,), prompt_lookup=3) as (engine, _):
        assert answered(engine) == expected


@pytest.mark.slow
def test_sequences_that_are_preempted_are_computed_again() -> None:
    model = tiny_model(layers=2)
    with over_stages(model, (1,)) as (engine, _):
        expected = answered(engine)
    with over_stages(model, (1,), kv_tokens=384) as (engine, _):
        assert answered(engine) == expected
        assert engine.core.scheduler.pool.capacity == 384
