"""A tiny random Llama and a byte-level tokenizer, made in memory."""

from __future__ import annotations

import queue
from functools import lru_cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
from bigmodel.server.engine.compute.choose_runner import RunnerChoice

EOS = "<|end|>"


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Any:
    """The tokenizer that tests share, see :func:`fresh_tokenizer`."""
    return fresh_tokenizer()


def fresh_tokenizer() -> Any:
    """One token per byte (ids 0 to 255 in the order of the alphabet), a few merges, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    fast.chat_template = (
        "{% if tools %}[tools: {{ tools | length }}]\n{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return fast


def spaced_tokenizer() -> Any:
    """A tokenizer of words as SentencePiece makes them: a space belongs to the word behind it, and the one that a
    text begins with is not shown. Its other tokens are single bytes."""
    words = ["\u2581the", "\u2581cat", "\u2581", "s", *(f"<0x{byte:02X}>" for byte in range(256)), EOS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=EOS))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def tiny_model(seed: int = 0, *, layers: int = 2, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A Llama with grouped-query attention; weights scaled up so that its choices are not all alike."""
    config = LlamaConfig(
        **{
            "vocab_size": len(tiny_tokenizer()),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "initializer_range": 0.2,
            "eos_token_id": None,
            "bos_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype).eval()


def tiny_engine(model: Any = None, *, known_runner: RunnerChoice | None = None, **options: Any) -> Engine:
    """A started engine over the tiny model."""
    options.setdefault("kv_bytes", 64 << 20)
    options.setdefault("max_sequences", 8)
    limits = EngineOptions(**options)
    engine = build_engine(model or tiny_model(), tiny_tokenizer(), options=limits, known_runner=known_runner)
    engine.start()
    return engine


class Collector:
    """A sink that keeps what arrives and lets a test wait for the end."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self._queue.put(event)

    def next(self, timeout: float = 60.0) -> Event:
        event = self._queue.get(timeout=timeout)
        self.events.append(event)
        return event

    def wait(self, timeout: float = 60.0) -> Event:
        """The final event."""
        while True:
            event = self.next(timeout)
            if isinstance(event, (Done, Failed)):
                return event

    def text(self, index: int = 0) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Delta) and e.index == index)

    def tokens(self, index: int = 0) -> list[int]:
        return [t for e in self.events if isinstance(e, Delta) and e.index == index for t in e.token_ids]

    def finish_reason(self, index: int = 0) -> str | None:
        reasons = [e.finish_reason for e in self.events if isinstance(e, Delta) and e.index == index]
        return reasons[-1] if reasons else None


_count = iter(range(1 << 62))


def make_request(prompt: str | list[int], *, n: int = 1, deadline: float | None = None, **params: Any) -> Request:
    ids = tiny_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    params.setdefault("max_tokens", 16)
    return Request(f"r{next(_count)}", ids, SamplingParams(**params), Collector(), n=n, deadline=deadline)


def ask(engine: Engine, prompt: str | list[int], **params: Any) -> Collector:
    """Submit and return the collector at once."""
    request = make_request(prompt, **params)
    collector = request.sink
    assert isinstance(collector, Collector)
    engine.submit(request)
    return collector
