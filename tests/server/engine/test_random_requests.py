"""Random requests to random models under tight budgets: no accelerator passes its own, each request has the tokens and
log-probabilities that it has alone, and at the end nothing is held."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.server import Loaded
from bigmodel.server.engine import Done, Engine, EngineOptions, Failed, build_engine
from bigmodel.server.engine.budget import planned_chunk
from bigmodel.server.loading import load
from tests.examples import alike
from tests.plan.brief import plans_are_searched_briefly as plans_are_searched_briefly
from tests.server.tiny import Collector, make_request, tiny_model, tiny_tokenizer

from .test_engine import everything

pytestmark = [pytest.mark.usefixtures("accelerators"), pytest.mark.slow]

HOST = "1GiB"
SHARES = (1.0, 0.8, 0.5)
"""Parts of the planned keys and values that the accelerator has memory for, beside all else."""


@alike("number", [2, 0, 1], first=1)
def test_random_requests_under_a_tight_budget(number: int, tmp_path: Path) -> None:
    draw = random.Random(number)
    model, there, kept = (tmp_path / name for name in ("model", "offloaded", "prefixes"))
    sizes = {"num_attention_heads": 8, "num_key_value_heads": draw.choice([1, 2, 8])}
    tiny_model(number, layers=draw.randint(2, 6), **sizes).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    placed = planned(draw, str(model), str(there))
    sequences = placed.plan.batch_size
    options: dict[str, Any] = {"max_sequences": sequences, "max_batch_tokens": 128}
    options |= draw.choice([{}, {"prefix_cache": False}, {"prefix_folder": kept}, {"prompt_lookup": 3}])
    gc.collect()
    reset_peak_memory(0)
    engine = build_engine(
        placed.model, placed.tokenizer, placed.plan, EngineOptions(**options), checkpoint=placed.checkpoint
    )
    engine.start()
    asked = [asking(draw, engine.core.max_length) for _ in range(5)]
    found = [send(engine, *each) for each in asked]
    for collector in found[-1:]:
        engine.cancel(collector.request)
    ended = [collector.wait() for collector in found]
    engine.stop()
    assert all(isinstance(each, Done) or (isinstance(each, Failed) and each.kind == "cancelled") for each in ended)
    assert max_memory_allocated(0) <= placed.plan.devices[0].budget
    nothing_is_held(engine)
    assert not [path for path in there.rglob("*") if path.suffix not in ("", ".safetensors", ".dat", ".json")]
    alone = build_engine(
        placed.model, placed.tokenizer, placed.plan, EngineOptions(max_sequences=sequences, prefix_cache=False)
    )
    alone.start()
    for each, collector, last in zip(asked, found, ended, strict=True):
        if isinstance(last, Done):
            expected = send(alone, *each)
            expected.wait()
            assert answer(collector) == answer(expected)
    alone.stop()


class Sent(Collector):
    """A sink that knows its request."""

    request: Any = None


def planned(draw: random.Random, model: str, there: str) -> Loaded:
    """The model where the accelerator has memory for a part of what it would take."""
    sequences = draw.randint(1, 2)
    shapes: Any = {
        "batch_size": sequences,
        "context_length": draw.choice([256, 384]),
        "padded": False,
        "prefill_chunk_size": planned_chunk(EngineOptions(max_batch_tokens=128), sequences),
    }
    entry = load(model, max_memory={0: "64MiB", "cpu": HOST}, **shapes).plan.devices[0]
    budget = int(entry.total - (1 - draw.choice(SHARES)) * entry.kv_cache)
    placed = load(model, max_memory={0: budget, "cpu": HOST}, offload_folder=there, **shapes)
    assert set(placed.plan.execution.values()) <= {0, "cpu"}
    return placed


def asking(draw: random.Random, longest: int) -> tuple[list[int], int, dict[str, Any]]:
    """A prompt, the number of answers, and how their tokens are drawn. Most prompts begin alike."""
    length = draw.choice([1, 127, 128, 129, draw.randint(1, longest), longest - 8])
    length = max(1, min(length, longest - 8))
    prompt = [(7 * place) % 251 for place in range(length)]
    prompt[draw.randrange(length) :] = []
    prompt += [draw.randrange(251) for _ in range(length - len(prompt))]
    params = {"temperature": draw.choice([0.0, 1.0]), "seed": draw.randrange(100), "logprobs": draw.choice([0, 2])}
    return prompt, draw.choice([1, 1, 2]), {**params, "max_tokens": draw.choice([1, 3, 6]), "ignore_eos": True}


def send(engine: Engine, prompt: list[int], count: int, params: dict[str, Any]) -> Sent:
    request = make_request(prompt, n=count, **params)
    request.sink = sent = Sent()
    sent.request = request
    engine.submit(request)
    return sent


def answer(collector: Sent) -> list[tuple[Any, ...]]:
    """Tokens, log-probabilities and text of each of its sequences: how they came in pieces does not matter."""
    found = []
    for index in range(collector.request.n):
        pieces = everything(collector, index)
        tokens, logprobs = ([each for piece in pieces for each in piece[which]] for which in (0, 1))
        found.append((tokens, logprobs, "".join(piece[2] for piece in pieces), pieces[-1][3]))
    return found


def nothing_is_held(engine: Engine) -> None:
    """All positions are free once cached prompts are forgotten."""
    scheduler = engine.core.scheduler
    assert not any((scheduler.running, scheduler.waiting, engine.core.requests))
    scheduler.prefix.clear()
    assert scheduler.pool.used == 0
