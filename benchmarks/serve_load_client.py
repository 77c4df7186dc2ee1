"""A client that measures a server over HTTP as `vllm bench serve` does, and what the server counts meanwhile.

Requests are sent as a Poisson stream, whatever is still being answered, and each answer is read as it streams. The
first token has come with the first event that has a choice. The time per output token is that from the first such event
to the last, divided by the tokens after the first; the gaps are those between the events.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .harness import BenchmarkError
from .serve_client import completion, exchange, get

FIRST, PER_TOKEN, GAP = "first token", "per output token", "gap"
MEAN, TOKENS = "first token, mean", "tokens/s"
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Load:
    """Requests and their arrival times.

    Attributes:
        prompts: A text for each request.
        prompt_tokens: The tokens of each.
        tokens: Tokens of each answer.
        per_second: Requests per second, on average.
        arrivals: Seconds from the start to each request.
        seed: Seed that these were drawn with.
    """

    prompts: Sequence[str]
    prompt_tokens: Sequence[int]
    tokens: int
    per_second: float
    arrivals: Sequence[float]
    seed: int = 0


def poisson_arrivals(count: int, per_second: float, seed: int) -> list[float]:
    """Arrival times of a Poisson stream, in seconds, stretched so that the last is that of the rate.

    They are those of `vllm bench serve --request-rate` with the same seed.
    """
    gaps = np.random.RandomState(seed).gamma(1.0, 1.0 / per_second, size=count)
    times = np.cumsum(gaps)
    return [float(time) for time in times * (count / per_second / times[-1])]


@dataclass
class Answer:
    """A streamed answer.

    Attributes:
        tokens: Tokens, by the usage in its last event.
        first: Seconds from the request until the first event that has a choice.
        gaps: Seconds between such events.
    """

    tokens: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)


def figures(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Percentiles of the answers' times in seconds, and tokens per second of a run that took ``seconds``."""
    first = [answer.first for answer in answers if answer.first is not None]
    per_token = [sum(answer.gaps) / (answer.tokens - 1) for answer in answers if answer.tokens > 1]
    gaps = [gap for answer in answers for gap in answer.gaps]
    found = {MEAN: float(np.mean(first)), TOKENS: sum(answer.tokens for answer in answers) / seconds}
    for name, values in ((FIRST, first), (PER_TOKEN, per_token), (GAP, gaps)):
        found |= {f"{name} p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return found


async def send(port: int, model: str, load: Load) -> dict[str, float]:
    """Send the requests at their times, and return the figures of their answers.

    Raises:
        BenchmarkError: An answer is an error, or shorter than it should be.
    """
    begun = time.perf_counter()

    async def one(prompt: str, arrives: float) -> Answer:
        await asyncio.sleep(max(0.0, begun + arrives - time.perf_counter()))
        answer = await streamed_answer(port, request_body(model, prompt, load.tokens))
        if answer.tokens != load.tokens or answer.first is None:
            raise BenchmarkError(f"an answer has {answer.tokens} tokens instead of {load.tokens}")
        return answer

    answers = await asyncio.gather(*(one(*each) for each in zip(load.prompts, load.arrivals, strict=True)))
    return figures(answers, time.perf_counter() - begun)


def request_body(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the body of a request for a completion, as `vllm bench serve` has it."""
    return {
        "model": model,
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": tokens,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def streamed_answer(port: int, body: dict[str, Any]) -> Answer:
    """Request a completion and read it.

    Raises:
        BenchmarkError: The server answers with an error.
    """
    answer, sent = Answer(), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(completion(body))
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            status, said = head.split(b" ", 2)[1].decode(), (await reader.read())[:300].decode(errors="replace")
            raise BenchmarkError(f"the server answered {status}: {said}")
        last = sent
        async for event in _events(reader):
            if event.get("choices"):
                now = time.perf_counter()
                if answer.first is None:
                    answer.first = now - sent
                else:
                    answer.gaps.append(now - last)
                last = now
            elif event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    finally:
        writer.close()
    return answer


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, each as soon as it is complete, out of a body in chunks."""
    buffer = b""
    while size := int(await reader.readline(), 16):
        buffer += (await reader.readexactly(size + 2))[:-2]
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield json.loads(event.removeprefix(b"data: "))


@dataclass(frozen=True)
class ServerCounts:
    """What ``GET /metrics`` has counted.

    Attributes:
        prompt_tokens: Prompt tokens computed.
        generated: Tokens generated.
        first_tokens: Requests that had a first token.
        first_seconds: The sum of their times to it, by the server.
        steps: Engine steps.
        sequences: The sum of their sequences.
        buckets: First tokens that took at most so many seconds, by these.
    """

    prompt_tokens: int
    generated: int
    first_tokens: int
    first_seconds: float
    steps: int
    sequences: int
    buckets: dict[float, int]

    def since(self, before: ServerCounts) -> ServerCounts:
        """Return what was counted after ``before``."""
        return ServerCounts(
            self.prompt_tokens - before.prompt_tokens,
            self.generated - before.generated,
            self.first_tokens - before.first_tokens,
            self.first_seconds - before.first_seconds,
            self.steps - before.steps,
            self.sequences - before.sequences,
            {bound: count - before.buckets[bound] for bound, count in self.buckets.items()},
        )

    def first_token(self, share: float) -> float:
        """Return the seconds that ``share`` of the first tokens took at most, linear within a bucket as Prometheus."""
        rank, below, lower = share * self.first_tokens, 0, 0.0
        for bound, count in sorted(self.buckets.items()):
            if count >= rank:
                return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / (count - below)
            below, lower = count, bound
        return lower


async def server_counts(port: int) -> ServerCounts:
    """Return what the server has counted so far."""
    _, text = await exchange(port, get("/metrics"))
    return parsed_counts(text.decode())


def parsed_counts(text: str) -> ServerCounts:
    """Return the counts in a text of ``GET /metrics``."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    buckets: dict[float, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "bigmodel_time_to_first_token_seconds_bucket":
                buckets[float(sample.labels["le"])] = int(sample.value)
            else:
                values[sample.name] = sample.value
    return ServerCounts(
        prompt_tokens=int(values["bigmodel_prompt_tokens_total"]),
        generated=int(values["bigmodel_generated_tokens_total"]),
        first_tokens=int(values["bigmodel_time_to_first_token_seconds_count"]),
        first_seconds=values["bigmodel_time_to_first_token_seconds_sum"],
        steps=int(values["bigmodel_step_sequences_count"]),
        sequences=int(values["bigmodel_step_sequences_sum"]),
        buckets=buckets,
    )
