"""From a model that was placed by a plan to an engine that keeps to it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.errors import ServeError
from bigmodel.server import Loaded
from bigmodel.server.engine import Engine, EngineOptions, build_engine
from bigmodel.server.engine.budget import DEFAULT_SEQUENCES
from bigmodel.server.engine.build import context_length, end_tokens
from bigmodel.server.engine.compute.runner import PackedRunner
from bigmodel.server.loading import PlannedModel, load
from tests.examples import alike
from tests.server.tiny import ask, fresh_tokenizer, tiny_engine, tiny_model, tiny_tokenizer

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


@pytest.mark.slow
def test_sequences_and_positions_are_those_of_the_plan(placed: Loaded) -> None:
    made = engine(placed)
    scheduler, entry = made.core.scheduler, placed.plan.devices["cpu"]
    assert SEQUENCES < scheduler.max_sequences == placed.plan.max_sequences() < DEFAULT_SEQUENCES
    assert made.kv_bytes_per_token == {"cpu": PER_TOKEN}
    assert scheduler.pool.capacity == scheduler.max_sequences * CONTEXT
    assert scheduler.pool.capacity * PER_TOKEN <= entry.kv_cache + entry.free
    assert scheduler.max_batch_tokens <= SEQUENCES * CONTEXT


@pytest.mark.slow
def test_sequences_at_once_are_limited_by_memory(placed: Loaded) -> None:
    made = engine(placed, max_sequences=SEQUENCES)
    made.start()
    most = 0
    taken = made.core.scheduler.schedule

    def watched() -> object:
        nonlocal most
        batch = taken()
        most = max(most, len(made.core.scheduler.running))
        return batch

    made.core.scheduler.schedule = watched  # type: ignore[method-assign, assignment]
    collectors = [ask(made, "the cat", max_tokens=5, ignore_eos=True) for _ in range(3 * SEQUENCES)]
    for collector in collectors:
        collector.wait()
    made.stop()
    assert most == SEQUENCES


@pytest.mark.long
@pytest.mark.slow
def test_what_attention_gathers_from_pages_keeps_to_the_budget(tmp_path: Path, accelerators: None) -> None:
    """More sequences than planned share the memory that is left; texts that made room for others are computed again,
    one token in a call, each of which gathers all before it."""
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    budgets = {0: "4MiB", "cpu": "1GiB"}
    placed = load(str(tmp_path), max_memory=budgets, batch_size=1, context_length=256)
    assert set(placed.plan.device_map.values()) == {0}
    made = engine(placed, max_sequences=8)
    gc.collect()
    reset_peak_memory(0)
    made.start()
    collectors = [ask(made, f"the cat {n} " * 17, max_tokens=14, ignore_eos=True) for n in range(8)]
    for collector in collectors:
        collector.wait()
    made.stop()
    assert made.core.scheduler.preemptions > 0
    entry = placed.plan.devices[0]
    assert made.core.scheduler.pool.capacity * PER_TOKEN >= 4 * entry.kv_cache
    assert max_memory_allocated(0) <= entry.budget
    assert isinstance(made.core.runner, PackedRunner)
    assert {"virtual:0": entry.kv_gather} == {
        device: nbytes * placed.plan.context_length for device, nbytes in made.core.runner.gathered_per_token().items()
    }


@pytest.mark.slow
def test_a_long_prompt_keeps_to_a_budget_that_holds_it_in_chunks_only(tmp_path: Path, accelerators: None) -> None:
    tiny_model(num_hidden_layers=4).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole = PlannedModel(str(tmp_path), {"context_length": 896, "padded": False}).plan({0: 64 << 20, "cpu": 1 << 30})
    budgets = {0: whole.devices[0].total * 3 // 5, "cpu": "1GiB"}
    placed = load(str(tmp_path), max_memory=budgets, context_length=896, padded=False, prefill_chunk_size="auto")
    assert placed.plan.prefill_chunk_size == 512
    assert set(placed.plan.execution.values()) == {0}
    made = engine(placed, max_sequences=1)
    assert made.core.scheduler.max_batch_tokens <= 512
    gc.collect()
    reset_peak_memory(0)
    made.start()
    ask(made, "the cat sat on the mat " * 48, max_tokens=5, ignore_eos=True).wait()
    made.stop()
    assert max_memory_allocated(0) <= budgets[0]  # type: ignore[operator]


@pytest.mark.slow
@alike("heads", [8, 1], first=1)
def test_the_longest_text_keeps_to_a_budget_that_leaves_nothing(tmp_path: Path, accelerators: None, heads: int) -> None:
    """Of keys and values there is memory for two texts of the planned length, and so for one that is twice as long."""
    tiny_model(num_attention_heads=8, num_key_value_heads=heads).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    shapes: Any = {"context_length": 384, "batch_size": 2, "padded": False, "prefill_chunk_size": 65}
    whole = load(str(tmp_path), max_memory={0: "64MiB", "cpu": "1GiB"}, **shapes)
    budgets = {0: whole.plan.devices[0].total, "cpu": "1GiB"}
    del whole
    placed = load(str(tmp_path), max_memory=budgets, **shapes)
    assert set(placed.plan.execution.values()) == {0}
    made = engine(placed, max_sequences=2)
    assert made.core.max_length == 384 * 130 // 128 < made.core.scheduler.pool.capacity
    gc.collect()
    reset_peak_memory(0)
    made.start()
    ask(made, [7 * n % 250 for n in range(made.core.max_length - 2)], max_tokens=2, ignore_eos=True).wait()
    made.stop()
    assert max_memory_allocated(0) <= budgets[0]  # type: ignore[operator]


def test_without_a_plan_there_is_a_default() -> None:
    made = build_engine(tiny_model(), tiny_tokenizer(), options=EngineOptions(kv_bytes=1 << 20))
    assert made.core.scheduler.max_sequences == DEFAULT_SEQUENCES
    assert made.max_requests == DEFAULT_SEQUENCES + 128


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ServeError, match="same vocabulary"):
        build_engine(tiny_model(), tiny_tokenizer(), draft_model=tiny_model(vocab_size=100))


def test_end_tokens_are_those_of_model_and_tokenizer() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [3, 5]
    assert end_tokens(model, tokenizer) == {3, 5, tokenizer.eos_token_id}


def test_a_sequence_is_no_longer_than_context_and_memory_allow() -> None:
    assert context_length(tiny_model()) == 1024
    engine = tiny_engine(kv_bytes=256 * PER_TOKEN)
    assert engine.core.max_length == 256
    engine.stop()


def test_the_longest_text_of_an_encoder_fits_its_positions_and_its_tokenizer() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 300, "intermediate_size": 16, "max_position_embeddings": 50}
    roberta, bert = RobertaModel(RobertaConfig(**sizes, pad_token_id=1)), BertModel(BertConfig(**sizes))

    def longest(model: Any, tokenizer: Any, **options: Any) -> int:
        return build_engine(model, tokenizer, options=EngineOptions(kv_bytes=1 << 20, **options)).core.max_length

    assert (longest(roberta, fresh_tokenizer()), longest(bert, fresh_tokenizer())) == (48, 50)
    short = fresh_tokenizer()
    short.model_max_length = 20
    assert (longest(roberta, short), longest(roberta, short, max_length=10)) == (20, 10)
    assert longest(bert, fresh_tokenizer(), max_length=1000) == 50
