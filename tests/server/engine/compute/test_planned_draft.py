"""Tokens are proposed where the plan predicts that to be faster; which tokens come does not depend on it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bigmodel.plan import Plan, make_plan
from bigmodel.plan.result.speculation import Speculation
from bigmodel.server.engine import Done, Engine, EngineOptions, build_engine
from bigmodel.server.http.status import speculation
from tests.server.engine.test_engine import flat, prompts
from tests.server.tiny import ask, tiny_model, tiny_tokenizer

NEVER = Speculation(4, ((1, 1.0), (2, 2.0), (64, 64.0)))
IN_BATCHES = Speculation(4, ((1, 1.0), (2, 2.0), (3, 3.0), (4, 3.0), (64, 3.1)))
"""Several sequences choose all experts anyway."""


@cache
def planned() -> Plan:
    return make_plan(tiny_model(), {"cpu": "64MiB"}, batch_size=8, context_length=512, per_pass=False)


def engine_with(found: Speculation | None, **options: Any) -> Engine:
    limits = EngineOptions(max_sequences=8, kv_bytes=8 << 20, **options)
    plan = replace(planned(), speculation=found)
    engine = build_engine(tiny_model(), tiny_tokenizer(), plan, limits, draft_model=tiny_model(0))
    engine.start()
    return engine


def answers(engine: Engine, asked: list[list[int]]) -> list[Any]:
    collectors = [ask(engine, prompt, max_tokens=12, temperature=0, ignore_eos=True) for prompt in asked]
    assert all(isinstance(collector.wait(), Done) for collector in collectors)
    engine.stop()
    return [flat(collector) for collector in collectors]


@pytest.mark.slow
def test_nothing_is_proposed_where_that_is_never_faster(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(NEVER)
    assert engine.core.drafter is None
    assert "speculation is off" in caplog.text
    assert "--force-speculation" in caplog.text
    answers(engine, prompts(1))
    assert engine.core.counts.drafted == 0


@pytest.mark.slow
def test_it_can_be_forced() -> None:
    engine = engine_with(NEVER, force_speculation=True)
    answers(engine, prompts(1))
    assert engine.core.counts.drafted > 0


@pytest.mark.slow
def test_a_step_proposes_what_is_fastest_for_its_sequences() -> None:
    asked = prompts(5)
    alone = engine_with(IN_BATCHES)
    assert speculation(alone) == {"alone": 0, "together": 4, "skipped_steps": 0}
    found = answers(alone, asked[:1])
    assert alone.core.counts.drafted == 0
    assert alone.core.drafter.skipped > 0  # type: ignore[union-attr]
    together = engine_with(IN_BATCHES)
    assert answers(together, asked)[0] == found[0] == answers(engine_with(None), asked[:1])[0]
    assert together.core.counts.accepted > 0


@pytest.mark.slow
def test_no_more_is_proposed_than_is_fastest() -> None:
    one = Speculation(4, ((1, 1.0), (2, 1.0), (3, 2.0), (64, 64.0)))
    engine = engine_with(one)
    answers(engine, prompts(1))
    assert 0 < engine.core.counts.drafted <= engine.core.steps


def test_a_plan_that_says_nothing_proposes_in_each_step() -> None:
    engine = engine_with(None)
    assert speculation(engine) is None
    answers(engine, prompts(1))
    assert engine.core.counts.drafted > 0
