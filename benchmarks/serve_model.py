"""Shared code of serving benchmarks: a model with random weights, prompts of ragged lengths, an engine."""

from __future__ import annotations

import queue
import random
import time
from dataclasses import dataclass, field
from typing import Any

from bigmodel.server.engine import (
    Delta,
    Done,
    Engine,
    EngineOptions,
    Event,
    Failed,
    Request,
    SamplingParams,
    build_engine,
)

SIZES: dict[str, dict[str, Any]] = {
    "8x1024": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16},
    "4x512": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
    "2x64": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCABULARY = 8192


def random_llama(size: str, seed: int = 0) -> Any:
    """A Llama of one of :data:`SIZES`, float32, random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = SIZES[size]["num_attention_heads"]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        **SIZES[size],
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def word_tokenizer(words: int = VOCABULARY) -> Any:
    """A tokenizer with one token for each of the words "0 ", "1 ", ...: nothing to learn, nothing to download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({str(word): word for word in range(words)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return fast


@dataclass(frozen=True)
class PromptJob:
    """A prompt, the number of tokens to generate, and its arrival time (seconds from the start)."""

    prompt: list[int]
    tokens: int
    arrives: float = 0.0


def ragged_jobs(count: int, *, seed: int, tokens: int, per_second: float | None = None) -> list[PromptJob]:
    """Prompts of 16 to 200 tokens; with ``per_second`` they arrive as a Poisson stream."""
    rng = random.Random(seed)
    jobs, now = [], 0.0
    for _ in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(16, 201))]
        jobs.append(PromptJob(prompt, tokens, now))
        if per_second is not None:
            now += rng.expovariate(per_second)
    return jobs


@dataclass
class Timed:
    """A sink that records the times of submission, of tokens, and of the end of a request."""

    sent: float
    over: queue.SimpleQueue[Event]
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0

    def put(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.arrivals.append(time.perf_counter())
            self.tokens += len(event.token_ids)
        else:
            self.over.put(event)


def started_engine(model: Any, **options: Any) -> Engine:
    """An engine over ``model`` with 1 GiB of keys and values."""
    options.setdefault("kv_bytes", 1 << 30)
    engine = build_engine(model, word_tokenizer(), options=EngineOptions(**options))
    engine.start()
    return engine


def run_jobs(engine: Engine, jobs: list[PromptJob]) -> tuple[float, list[Timed]]:
    """Submit jobs at their arrival times; return the seconds from the first to the last token, and one sink per job."""
    over: queue.SimpleQueue[Event] = queue.SimpleQueue()
    sinks = []
    begun = time.perf_counter()
    for number, job in enumerate(jobs):
        time.sleep(max(0.0, begun + job.arrives - time.perf_counter()))
        sink = Timed(time.perf_counter(), over)
        sinks.append(sink)
        params = SamplingParams(job.tokens, temperature=0.0, ignore_eos=True)
        engine.submit(Request(f"{begun}-{number}", job.prompt, params, sink))
    for _ in jobs:
        event = over.get()
        if isinstance(event, Failed):
            raise RuntimeError(event.message)  # noqa: TRY004
        assert isinstance(event, Done)
    return time.perf_counter() - begun, sinks
