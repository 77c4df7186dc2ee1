"""The state that routes share: settings, engine, tokenizer, plan."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request as HTTPRequest

from bigmodel.errors import ServeError
from bigmodel.server.answers.parsers.formats import AUTO, ModelFormats, check_names, formats_of
from bigmodel.server.embedding_config import EmbeddingConfig, embedding_config
from bigmodel.server.engine.budget import EngineOptions
from bigmodel.server.engine.engine import Engine
from bigmodel.server.engine.sampling.grammar import GrammarCompiler
from bigmodel.server.http.client_limits import Shares
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.keys import ApiKey, KeyRing
from bigmodel.server.http.respond import Mailbox, Relay
from bigmodel.server.http.telemetry import Telemetry
from bigmodel.server.loading import Loading
from bigmodel.server.text.codec import TextCodec
from bigmodel.server.text.images import ImageSupport

BODY_BYTES = 128 << 10
"""Bytes of a request body beside its prompt: tools, a schema, names of fields."""

BODY_BYTES_PER_TOKEN = 32
"""Bytes that a token of the context may take in a body: as text with its escapes, or as a number of several prompts."""

MOST_BODY_BYTES = 8 << 20
"""Bytes of the longest body that is accepted where no limit was set, for any context."""


LARGE_OF_A_CLIENT, LARGE = 8, 32
"""Requests with large bodies that are in memory at once: of one client, and of all."""

PARSING_THREADS = 2
"""Threads that parse and tokenise large bodies; one of them at most works for the same client."""


@dataclass(frozen=True)
class Settings:
    """Settings of the server.

    Args:
        model_name: Name of the model for clients.
        api_keys: Accepted API keys, as they are or with a name and limits; without any, no key is needed.
        max_body_bytes: Longest request body; None for a limit that follows from the length of the model's context.
        request_timeout: Seconds a request may take, waiting included; None for no limit. Requests may set a shorter
            ``timeout``.
        drain_timeout: Seconds that running requests have to finish after SIGTERM.
        engine: Limits and batching of the engine.
        tool_parser: Format of the model's tool calls, "auto" for that of its chat template, or "none".
        reasoning_parser: Format of its reasoning, alike.
        telemetry: Whether requests have OpenTelemetry's spans.

    Raises:
        ServeError: A key is empty, or begins or ends with a space, or there is no such parser.
    """

    model_name: str
    api_keys: tuple[str | ApiKey, ...] = ()
    max_body_bytes: int | None = None
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    engine: EngineOptions = field(default_factory=EngineOptions)
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    telemetry: bool = False

    def __post_init__(self) -> None:
        check_names(self.tool_parser, self.reasoning_parser)
        self.named_keys  # noqa: B018  # raises for a wrong one

    @property
    def named_keys(self) -> tuple[ApiKey, ...]:
        """The accepted keys, each with its name and limits."""
        return tuple(key if isinstance(key, ApiKey) else ApiKey.of(key) for key in self.api_keys)


class Reporter(Protocol):
    """Answers GET /metrics and GET /plan. A process that is one of several may replace it, to answer for all."""

    def metrics(self) -> bytes:
        """Metrics in the format of Prometheus."""
        ...

    def plan(self) -> dict[str, Any]:
        """The body of GET /plan."""
        ...


@dataclass
class ServerState:
    """State of one application. ``engine`` and ``codec`` are None while the model loads."""

    settings: Settings
    engine: Engine | None = None
    codec: TextCodec | None = None
    model: Any = None
    images: ImageSupport | None = None  # for models whose prompts may have images
    plan: Any = None
    weights: dict[str, int] | None = None  # bytes per device, counted at first use
    loading: Loading = field(default_factory=Loading)
    loader: threading.Thread | None = None  # while the model loads in the background
    failure: BaseException | None = None
    draining: bool = False
    on_loaded: Callable[[], None] | None = None  # called in the loader's thread, before the first request is taken
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Any = None  # Metrics, set by the application
    reporter: Reporter | None = None  # set by the application
    telemetry: Telemetry | None = None  # set by the application
    keys: KeyRing = field(default_factory=lambda: KeyRing(()))  # set by the application
    large: Shares = field(default_factory=lambda: Shares(LARGE_OF_A_CLIENT, LARGE))
    parsing: Shares = field(default_factory=lambda: Shares(1, PARSING_THREADS))
    compiling: Shares = field(default_factory=lambda: Shares(1, 1))  # the worker compiles one schema at a time
    _formats: ModelFormats | None = None
    _embedding: EmbeddingConfig | None = None
    _relay: Relay | None = None
    _grammars: GrammarCompiler | None = None
    _grammar_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def body_limit(self) -> int:
        """Bytes of the longest request body: while the model loads, that of any model."""
        if self.settings.max_body_bytes is not None:
            return self.settings.max_body_bytes
        batches = self.engine is not None and not self.engine.core.generates  # of many texts, each of which is bounded
        return MOST_BODY_BYTES if batches else self.text_limit

    @property
    def text_limit(self) -> int:
        """Bytes of the longest text in a request body: more than any prompt that fits the context needs."""
        if self.engine is None or self.images is not None:
            return MOST_BODY_BYTES
        return min(BODY_BYTES + BODY_BYTES_PER_TOKEN * self.engine.core.max_length, MOST_BODY_BYTES)

    def mailbox(self, *, at_once: bool = False) -> Mailbox:
        """A mailbox of the running event loop; ``at_once`` for responses that are not streamed."""
        if self._relay is None:
            self._relay = Relay(asyncio.get_running_loop())
        return Mailbox(self._relay, at_once=at_once)

    def formats(self, codec: TextCodec) -> ModelFormats:
        """Formats of the model's tool calls and reasoning, found at first use."""
        if self._formats is None:
            self._formats = formats_of(codec, self.settings.tool_parser, self.settings.reasoning_parser)
        return self._formats

    def embedding_config(self) -> EmbeddingConfig:
        """How the model's states become an embedding, found at first use; raises a 400 where they cannot."""
        if self._embedding is None:
            try:
                self._embedding = embedding_config(self.model)
            except ServeError as error:
                raise APIError(400, str(error), param="model", code="model_not_supported") from error
        return self._embedding

    def grammar_compiler(self) -> GrammarCompiler:
        """The grammar compiler, made at first use. Thread-safe."""
        with self._grammar_lock:
            if self._grammars is None:
                assert self.engine is not None
                assert self.codec is not None
                core = self.engine.core
                self._grammars = GrammarCompiler(self.codec.tokenizer, core.vocabulary_size, core.eos_ids)
            return self._grammars

    def close(self) -> None:
        """End the process that compiles grammars."""
        with self._grammar_lock:
            if self._grammars is not None:
                self._grammars.close()

    @property
    def failed(self) -> bool:
        """Whether loading or the engine has failed."""
        return self.failure is not None or (self.engine is not None and not self.engine.healthy)

    def ready_engine(self, *, generating: bool = True) -> tuple[Engine, TextCodec]:
        """The engine and tokenizer; raises a 503 while there are none.

        ``generating``: raises a 400 for a model that generates no text.
        """
        if self.draining:
            raise APIError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        if self.failed:
            raise APIError(503, "the engine has stopped", code="engine_stopped")
        if self.engine is None or self.codec is None:
            raise APIError(
                503, f"the model is loading ({self.loading.stage})", code="loading", headers={"Retry-After": "5"}
            )
        if generating and not self.engine.core.generates:
            why = f"'{self.settings.model_name}' generates no text; it gives embeddings or scores"
            raise APIError(400, why, param="model", code="model_not_supported")
        return self.engine, self.codec

    def ready_text(self) -> tuple[int, TextCodec]:
        """Most tokens of a text, and the tokenizer; raises a 503 while there are none."""
        engine, codec = self.ready_engine(generating=False)
        return engine.core.max_length, codec

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless ``name`` is the model served."""
        if name is not None and name != self.settings.model_name:
            raise APIError(
                404,
                f"the model '{name}' does not exist; this server has '{self.settings.model_name}'",
                param="model",
                code="model_not_found",
            )


def state_of(http: HTTPRequest) -> ServerState:
    """State of the application that a request came to."""
    state: ServerState = http.app.state.server
    return state
