"""OpenTelemetry, an extra: a span for each HTTP request, and below it those of waiting, prompt and answer.

Spans go where the standard environment variables say (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``, ...), or
to the tracer provider that the process has set up. A request that carries ``traceparent`` continues its trace. Spans
hold numbers and names, no text of prompts or answers.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from bigmodel.errors import ServeError
from bigmodel.server.engine.scheduling.request import Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXCLUDED = "/health$,/ready$,/metrics$,/plan$"
"""Paths that are polled, and have no spans."""

FLUSH_SECONDS = 3.0
"""How long the end of the server may take to send the last spans."""


class Telemetry:
    """Makes the spans of a server.

    Raises:
        ServeError: OpenTelemetry is not installed.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise ServeError("--telemetry needs OpenTelemetry: pip install 'bigmodel[otel]'") from error
        found = trace.get_tracer_provider()
        self._exporter: Any = None
        if not isinstance(found, TracerProvider):
            found, self._exporter = _exporting()
        self.provider: TracerProvider = found
        self._tracer = self.provider.get_tracer("bigmodel")

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, with a span for each request that it answers."""
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

        return OpenTelemetryMiddleware(
            app, excluded_urls=EXCLUDED, tracer_provider=self.provider, exclude_spans=["receive", "send"]
        )

    def begin(self, request: Request) -> None:
        """Remember the span that an engine request belongs to: the current one."""
        from opentelemetry import context

        request.trace = context.get_current()

    def finished(self, request: Request, outcome: str, model: str) -> None:
        """Make the spans of an engine request that has ended now; ``model`` is the model's name for clients."""
        now = time.monotonic()
        started, first = request.sequences[0].started_at, request.first_token_at
        parts = [("queue", request.arrived, started or now), ("prompt", started, first or now), ("answer", first, now)]
        attributes: dict[str, str | int] = {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.output_tokens": request.completion_tokens,
            "bigmodel.cached_tokens": request.sequences[0].cached_tokens,
            "bigmodel.outcome": outcome,
        }
        if request.key:
            attributes["bigmodel.key"] = request.key
        offset = time.time_ns() - int(now * 1e9)
        for name, begin, end in parts:
            if begin is not None:
                span = self._tracer.start_span(
                    f"bigmodel {name}", request.trace, attributes=attributes, start_time=int(begin * 1e9) + offset
                )
                span.end(int(end * 1e9) + offset)

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        if self._exporter is not None:
            flush = threading.Thread(target=self.provider.force_flush, name="bigmodel-telemetry", daemon=True)
            flush.start()  # the time limit of `force_flush` itself does not hold while a collector does not answer
            flush.join(FLUSH_SECONDS)
            self._exporter.shutdown()  # gives up what would be sent again
            self.provider.shutdown()


def _exporting() -> tuple[TracerProvider, Any]:
    """A provider that sends spans where the environment says, and its exporter."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = Resource({"service.name": "bigmodel"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter
