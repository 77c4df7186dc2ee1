"""Shared code of serving benchmarks: a model with random weights, prompts of ragged lengths, an engine."""

from __future__ import annotations

import argparse
import queue
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

from .harness.devices import first_device, is_virtual

if TYPE_CHECKING:
    import torch

SIZES: dict[str, dict[str, Any]] = {
    "16x2048": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8x1024": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16},
    "4x512": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
    "2x64": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCABULARY = 8192


def random_llama(size: str, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
    """A Llama of one of :data:`SIZES` with random weights of ``dtype`` (None: float32), on the host."""
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
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype or torch.float32).eval()


def served_llama(options: argparse.Namespace, usual: str = "8x1024") -> tuple[str, Any]:
    """The size that ``--size`` asks for, and a Llama of it on ``--device``.

    By default it is tiny with ``--quick``, and "16x2048" in bfloat16 on CUDA.
    """
    import torch

    from bigmodel.devices import virtual

    on_cuda = options.device.startswith("cuda")
    size = options.size or ("2x64" if options.quick else "16x2048" if on_cuda else usual)
    if is_virtual(options.device):
        virtual.enable(count=1)
    model = random_llama(size, options.seed, torch.bfloat16 if on_cuda else None)
    return size, model.to(first_device(options.device))


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


def equal_jobs(count: int, *, seed: int, tokens: int) -> list[PromptJob]:
    """Prompts of 108 tokens each, the mean of ragged ones, that all arrive at the start."""
    rng = random.Random(seed)
    return [PromptJob([rng.randrange(VOCABULARY) for _ in range(108)], tokens) for _ in range(count)]


@dataclass
class Timed:
    """A sink that records the tokens of a request, and the times of its submission and of each token."""

    sent: float
    over: queue.SimpleQueue[Event]
    arrivals: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def put(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.arrivals.append(time.perf_counter())
            self.token_ids += event.token_ids
        else:
            self.over.put(event)


def started_engine(model: Any, **options: Any) -> Engine:
    """An engine over ``model`` with 1 GiB of keys and values."""
    options.setdefault("kv_bytes", 1 << 30)
    engine = build_engine(model, word_tokenizer(), options=EngineOptions(**options))
    engine.start()
    return engine


def run_jobs(engine: Engine, jobs: list[PromptJob], temperature: float = 0.0) -> tuple[float, list[Timed]]:
    """Submit jobs at their arrival times; return the seconds from the first to the last token, and one sink per job."""
    over: queue.SimpleQueue[Event] = queue.SimpleQueue()
    sinks = []
    begun = time.perf_counter()
    for number, job in enumerate(jobs):
        time.sleep(max(0.0, begun + job.arrives - time.perf_counter()))
        sink = Timed(time.perf_counter(), over)
        sinks.append(sink)
        params = SamplingParams(job.tokens, temperature=temperature, seed=number, ignore_eos=True)
        engine.submit(Request(f"{begun}-{number}", job.prompt, params, sink))
    for _ in jobs:
        event = over.get()
        if isinstance(event, Failed):
            raise RuntimeError(event.message)  # noqa: TRY004
        assert isinstance(event, Done)
    return time.perf_counter() - begun, sinks
