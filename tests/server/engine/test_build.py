"""What the engine may hold is what the plan says: one truth for placement and admission."""

from __future__ import annotations

import pytest

from bigmodel.errors import ServeError
from server import Loaded
from server.engine import Engine, EngineOptions, build_engine
from server.engine.build import DEFAULT_SEQUENCES
from server.loading import load
from tests.server.tiny import ask, tiny_model, tiny_tokenizer

PER_TOKEN = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, dimensions, bytes
SEQUENCES, CONTEXT = 3, 256


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The tiny model, planned for a few sequences under a budget."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return load(str(folder), max_memory={"cpu": "4MiB"}, batch_size=SEQUENCES, context_length=CONTEXT)


def engine(placed: Loaded, **options: int) -> Engine:
    return build_engine(placed.model, placed.tokenizer, placed.plan, EngineOptions(**options))


def test_sequences_and_positions_are_those_of_the_plan(placed: Loaded) -> None:
    made = engine(placed)
    scheduler = made.core.scheduler
    assert scheduler.max_sequences == placed.plan.batch_size == SEQUENCES
    assert made.kv_bytes_per_token == {"cpu": PER_TOKEN}
    assert scheduler.pool.capacity == SEQUENCES * CONTEXT
    assert scheduler.pool.capacity * PER_TOKEN <= placed.plan.devices["cpu"].kv_cache


def test_no_more_run_at_once_than_were_planned_for(placed: Loaded) -> None:
    made = engine(placed)
    made.start()
    most = 0
    taken = made.core.scheduler.schedule

    def watched() -> object:
        nonlocal most
        grants = taken()
        most = max(most, len(made.core.scheduler.running))
        return grants

    made.core.scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    collectors = [ask(made, "the cat", max_tokens=5, ignore_eos=True) for _ in range(3 * SEQUENCES)]
    for collector in collectors:
        collector.wait()
    made.stop()
    assert most == SEQUENCES


def test_what_the_plan_does_not_leave_is_refused(placed: Loaded) -> None:
    entry = placed.plan.devices["cpu"]
    assert entry.free is not None
    most = entry.kv_cache + entry.free
    assert engine(placed, kv_bytes=most).core.scheduler.pool.capacity == most // PER_TOKEN // 128 * 128
    with pytest.raises(ServeError, match="more than the plan leaves on cpu"):
        engine(placed, kv_bytes=most + 1)


def test_without_a_plan_there_is_a_default() -> None:
    made = build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(kv_bytes=1 << 20))
    assert made.core.scheduler.max_sequences == DEFAULT_SEQUENCES
    assert made.max_requests == DEFAULT_SEQUENCES + 128


def test_many_sequences_raise_the_tokens_of_a_step() -> None:
    options = EngineOptions(max_sequences=600, kv_bytes=1 << 20)
    made = build_engine(tiny_model(), tiny_tokenizer(), options=options)
    assert made.core.scheduler.max_batch_tokens == 600 + 128
