"""Spans of requests: one tree for each, in the trace of the client, with numbers and no text."""

from __future__ import annotations

import sys
import threading
from typing import Any

import httpx
import pytest

from bigmodel.errors import ServeError
from bigmodel.server.http import telemetry
from bigmodel.server.http.telemetry import Telemetry
from tests.server.live import serving, tiny_app

pytest.importorskip("opentelemetry.instrumentation.asgi", reason="opentelemetry-instrumentation-asgi is not installed")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the process has set up to receive spans."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter = memory.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.mark.slow
def test_a_request_has_spans_of_waiting_prompt_and_answer(spans: Any) -> None:
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 3, "ignore_eos": True}
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with serving(tiny_app(telemetry=True, api_keys=("alpha",))) as url:
        sent = httpx.post(url + "/v1/completions", json=body, headers={"x-api-key": "alpha", **header})
        assert sent.status_code == 200
        httpx.get(url + "/health")
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"POST /v1/completions", "bigmodel queue", "bigmodel prompt", "bigmodel answer"}
    http = found.pop("POST /v1/completions")
    assert f"{http.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in (http, *found.values())} == {TRACE}
    assert {span.parent.span_id for span in found.values()} == {http.context.span_id}
    queue, prompt, answer = (found[f"bigmodel {name}"] for name in ("queue", "prompt", "answer"))
    assert http.start_time <= queue.start_time <= queue.end_time == prompt.start_time
    assert prompt.end_time == answer.start_time <= answer.end_time
    assert answer.attributes["gen_ai.usage.output_tokens"] == 3
    assert answer.attributes["gen_ai.usage.input_tokens"] == sent.json()["usage"]["prompt_tokens"]
    assert answer.attributes["bigmodel.key"].startswith("key-")
    assert "cat" not in str([dict(span.attributes) for span in (http, *found.values())])


def test_without_the_extra_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ServeError, match=r"bigmodel\[otel\]"):
        Telemetry()


@pytest.mark.slow
def test_an_end_without_a_collector_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_SECONDS", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    made = Telemetry()
    made.provider.get_tracer("test").start_span("one").end()
    made.close()
    assert not [thread for thread in threading.enumerate() if "telemetry" in thread.name]
