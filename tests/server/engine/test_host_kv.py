"""An engine whose keys and values lie on the host: it keeps to its budget, and has the tokens of one without."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.plan import Plan
from bigmodel.server import Loaded
from bigmodel.server.engine import Engine, EngineOptions, build_engine
from bigmodel.server.loading import PlannedModel, load
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly
from tests.server.tiny import ask, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("accelerators")

CONTEXT, SEQUENCES = 256, 2
SHAPES: Any = {"context_length": CONTEXT, "batch_size": SEQUENCES, "padded": False, "prefill_chunk_size": 64}
PROMPTS = ["the cat sat on the mat " * 11, "a dog " * 9, "the cat sat on the mat " * 6 + "and slept"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}
    tiny_model(**sizes, intermediate_size=32).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


def loaded(folder: Path, share: float) -> Loaded:
    """The model within a share of what all of it and of its keys and values takes."""
    whole = planned(folder, 64 << 20)
    return load(str(folder), device_map=planned(folder, int(whole.devices[0].total * share)), **SHAPES)


@cache
def planned(folder: Path, budget: int) -> Plan:
    return PlannedModel(str(folder), SHAPES).plan({0: budget, "cpu": 1 << 30})


def answers(engine: Engine) -> list[list[int]]:
    """Ask all at once, and once more what begins with a cached prompt."""
    engine.start()
    asked = [ask(engine, prompt, max_tokens=2, ignore_eos=True, temperature=0.0) for prompt in PROMPTS]
    for each in asked:
        each.wait()
    asked.append(ask(engine, PROMPTS[0] + "again", max_tokens=2, ignore_eos=True, temperature=0.0))
    asked[-1].wait()
    engine.stop()
    return [each.tokens() for each in asked]


def built(placed: Loaded, **options: Any) -> Engine:
    return build_engine(placed.model, placed.tokenizer, placed.plan, EngineOptions(row_multiple=8, **options))


@pytest.mark.slow
def test_tokens_are_those_with_all_on_the_accelerator_and_the_budget_holds(folder: Path) -> None:
    expected = answers(built(loaded(folder, 1.0), max_sequences=2))
    placed = loaded(folder, 0.8)
    assert placed.plan.kv_on_host
    made = built(placed, max_sequences=2)
    gc.collect()
    reset_peak_memory(0)
    assert answers(made) == expected
    entry = placed.plan.devices[0]
    assert max_memory_allocated(0) <= entry.total <= entry.budget
    assert made.kv_bytes_per_token["cpu"] > 0
    assert made.core.scheduler.pool.capacity <= placed.plan.context_length * placed.plan.max_sequences()
    assert made.core.scheduler.prefix.hits
