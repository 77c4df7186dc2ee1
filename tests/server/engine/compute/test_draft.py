"""Speculative decoding changes how many steps there are, never a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from bigmodel.errors import ServeError
from bigmodel.server.engine import Done, Engine, EngineOptions, build_engine
from tests.examples import alike
from tests.server.engine.test_engine import flat, prompts, run_alone, settings
from tests.server.tiny import ask, tiny_model, tiny_tokenizer


def engine_with(draft: Any, **options: Any) -> Engine:
    options.setdefault("kv_bytes", 64 << 20)
    options.setdefault("max_sequences", 8)
    engine = build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(**options), draft_model=draft)
    engine.start()
    return engine


def expected(asked: list[list[int]], tokens: int) -> list[Any]:
    plain = engine_with(None)
    alone = run_alone(plain, asked, tokens)
    plain.stop()
    return alone


@pytest.mark.slow
@alike("draft_seed", [0, 1], first=1, ids=["accepted", "rejected"])
def test_the_bits_are_those_without_a_draft_model(draft_seed: int) -> None:
    asked = prompts(5, 200)
    alone = expected(asked, 10)
    engine = engine_with(tiny_model(draft_seed))
    together = [ask(engine, p, max_tokens=10, **settings(i)) for i, p in enumerate(asked)]
    for collector, result in zip(together, alone, strict=True):
        assert isinstance(collector.wait(), Done)
        assert flat(collector) == result
    assert engine.core.counts.drafted > 0
    engine.stop()


@pytest.mark.slow
def test_a_model_that_drafts_for_itself_saves_steps() -> None:
    engine = engine_with(tiny_model(0))
    steps = engine.core.steps
    ask(engine, "the cat", max_tokens=50, temperature=0, ignore_eos=True).wait()
    assert engine.core.counts.accepted >= 0.9 * engine.core.counts.drafted
    assert engine.core.steps - steps <= 16
    engine.stop()


@pytest.mark.long
@pytest.mark.slow
def test_the_bits_are_those_without_a_draft_model_when_memory_is_short() -> None:
    asked = prompts(6, 200)
    alone = expected(asked, 36)
    engine = engine_with(tiny_model(0), kv_bytes=2 * 512 * 128 * 4, prefix_cache=False)
    collectors = [ask(engine, p, max_tokens=36, **settings(i)) for i, p in enumerate(asked)]
    for collector, result in zip(collectors, alone, strict=True):
        assert isinstance(collector.wait(), Done)
        assert flat(collector) == result
    assert engine.core.scheduler.preemptions > 0
    assert engine.core.scheduler.pool.used == 0
    engine.stop()


def test_the_draft_models_memory_is_part_of_the_budget() -> None:
    with_draft, without = engine_with(tiny_model(0)), engine_with(None)
    assert with_draft.core.scheduler.pool.capacity == without.core.scheduler.pool.capacity // 2
    with_draft.stop()
    without.stop()


@pytest.mark.slow
def test_a_draft_model_with_a_shorter_context_proposes_only_within_it() -> None:
    torch.manual_seed(0)
    short = transformers.GPT2Config(vocab_size=len(tiny_tokenizer()), n_embd=16, n_layer=1, n_head=2, n_positions=24)
    asked = [list(range(1, 11)), list(range(1, 41))]
    alone = expected(asked, 40)
    engine = engine_with(transformers.GPT2LMHeadModel(short).eval())
    collectors = [ask(engine, p, max_tokens=40, **settings(i)) for i, p in enumerate(asked)]
    for collector, result in zip(collectors, alone, strict=True):
        assert isinstance(collector.wait(), Done)
        assert flat(collector) == result
    assert engine.core.counts.drafted > 0
    engine.stop()


@pytest.mark.slow
def test_a_draft_model_that_fails_costs_its_drafts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompts(2)
    alone = expected(asked, 10)
    engine = engine_with(tiny_model(0))

    def broken(sequences: Any) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(engine.core.drafter, "propose", broken)
    for index, (prompt, result) in enumerate(zip(asked, alone, strict=True)):
        collector = ask(engine, prompt, max_tokens=10, **settings(index))
        assert isinstance(collector.wait(), Done)
        assert flat(collector) == result
    engine.stop()


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ServeError, match="the draft model has 300 tokens, the model 261"):
        engine_with(tiny_model(vocab_size=300))
