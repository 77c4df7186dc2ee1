"""The client that measures a server by the protocol of `vllm bench serve`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bigmodel.benchmarks.harness import BenchmarkError
from bigmodel.benchmarks.serve_load_client import (
    Answer,
    Load,
    ServerCounts,
    figures,
    parsed_counts,
    poisson_arrivals,
    request_body,
    send,
    streamed_answer,
)

COUNTED = """\
# TYPE bigmodel_prompt_tokens counter
bigmodel_prompt_tokens_total 60.0
# TYPE bigmodel_generated_tokens counter
bigmodel_generated_tokens_total 15.0
# TYPE bigmodel_time_to_first_token_seconds histogram
bigmodel_time_to_first_token_seconds_bucket{le="0.1"} 1.0
bigmodel_time_to_first_token_seconds_bucket{le="+Inf"} 3.0
bigmodel_time_to_first_token_seconds_count 3.0
bigmodel_time_to_first_token_seconds_sum 0.75
# TYPE bigmodel_step_sequences histogram
bigmodel_step_sequences_bucket{le="+Inf"} 5.0
bigmodel_step_sequences_count 5.0
bigmodel_step_sequences_sum 9.0
"""


def counts(buckets: dict[float, int]) -> ServerCounts:
    return ServerCounts(0, 0, max(buckets.values()), 0.0, 0, 0, buckets)


async def answering(pieces: Sequence[bytes], status: str = "200 OK") -> asyncio.Server:
    """A server that answers each request with a body in these chunks."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in (*pieces, b""):
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def streamed(pieces: Sequence[bytes], status: str = "200 OK") -> Answer:
    async def read() -> Answer:
        async with await answering(pieces, status) as server:
            return await streamed_answer(server.sockets[0].getsockname()[1], request_body("model", "1 2", 3))

    return asyncio.run(read())


CHOICE, USAGE = event({"choices": [{"text": "7"}]}), event({"choices": [], "usage": {"completion_tokens": 3}})


def test_arrivals_are_those_of_vllm() -> None:
    np.random.seed(5)
    delays = [np.random.gamma(shape=1.0, scale=1 / 4.0) for _ in range(50)]
    for at in range(1, 50):
        delays[at] += delays[at - 1]
    assert poisson_arrivals(50, 4.0, seed=5) == pytest.approx([delay * 50 / 4.0 / delays[-1] for delay in delays])


def test_arrivals_keep_the_rate_and_their_order() -> None:
    times = poisson_arrivals(200, 8.0, seed=1)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(25)
    assert times != poisson_arrivals(200, 8.0, seed=2)


def test_figures_are_percentiles_over_requests_and_over_gaps() -> None:
    answers = [Answer(tokens=3, first=0.1, gaps=[0.02, 0.04]), Answer(tokens=5, first=0.3, gaps=[0.01, 0.01, 0.06])]
    found = figures(answers, seconds=2.0)
    assert found["tokens/s"] == 4
    assert found["first token, mean"] == pytest.approx(0.2)
    assert found["first token p50"] == pytest.approx(0.2)
    assert found["first token p95"] == pytest.approx(0.29)
    # A gap may stand for several tokens: the time per token counts tokens, not events.
    assert found["per output token p50"] == pytest.approx((0.06 / 2 + 0.08 / 4) / 2)
    assert found["gap p50"] == pytest.approx(0.02)
    assert found["gap p99"] == pytest.approx(np.percentile([0.02, 0.04, 0.01, 0.01, 0.06], 99))


def test_an_answer_is_read_as_it_streams_however_it_is_split() -> None:
    whole = b": ping\n\n" + CHOICE * 3 + USAGE + event(b"[DONE]")
    for size in (1, 7, len(whole)):
        answer = streamed([whole[at : at + size] for at in range(0, len(whole), size)])
        assert answer.tokens == 3
        assert answer.first is not None
        assert answer.first > 0
        assert len(answer.gaps) == 2


def test_an_event_without_a_choice_is_no_token() -> None:
    answer = streamed([USAGE, event(b"[DONE]")])
    assert answer.first is None
    assert answer.gaps == []


def test_an_error_of_the_server_is_reported() -> None:
    with pytest.raises(BenchmarkError, match=r"(?s)the server answered 429: .*busy"):
        streamed([b"busy"], "429 Too Many Requests")


def test_an_answer_that_is_too_short_is_an_error() -> None:
    async def short() -> None:
        async with await answering([CHOICE, USAGE]) as server:
            await send(server.sockets[0].getsockname()[1], "model", Load(["1"], [1], 8, 1.0, [0.0]))

    with pytest.raises(BenchmarkError, match="3 tokens instead of 8"):
        asyncio.run(short())


def test_what_the_server_counts_is_read() -> None:
    found = parsed_counts(COUNTED)
    assert found == ServerCounts(60, 15, 3, 0.75, 5, 9, {0.1: 1, math.inf: 3})
    assert found.since(found) == ServerCounts(0, 0, 0, 0.0, 0, 0, {0.1: 0, math.inf: 0})


def test_percentiles_of_a_histogram_are_linear_within_a_bucket() -> None:
    found = counts({0.1: 10, 0.2: 20, 0.4: 20, math.inf: 20})
    assert found.first_token(0.5) == pytest.approx(0.1)
    assert found.first_token(0.75) == pytest.approx(0.15)
    assert found.first_token(1.0) == pytest.approx(0.2)
    # What lies beyond the last bound is shown as that bound.
    assert counts({0.1: 1, math.inf: 4}).first_token(0.95) == pytest.approx(0.1)
