"""The state that routes share: settings, models, and what has a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fastapi import Request as HTTPRequest

from bigmodel.errors import ServeError
from bigmodel.server.answers.parsers.formats import AUTO, check_names
from bigmodel.server.batches.batches import Batches
from bigmodel.server.batches.limits import STORE_BYTES
from bigmodel.server.engine.budget import EngineOptions
from bigmodel.server.http.client_limits import Shares
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.keys import ApiKey, KeyRing
from bigmodel.server.http.origins import check_origins
from bigmodel.server.http.respond import Mailbox, Relay, unless_disconnected
from bigmodel.server.http.telemetry import Telemetry
from bigmodel.server.models.pool import LoadFailedError, ModelPool, PoolClosedError, TookTooLongError
from bigmodel.server.models.running import RunningModel
from bigmodel.server.models.served import ServedModel
from bigmodel.server.text.image_urls import ImageHosts

BODY_BYTES = 128 << 10
"""Bytes of a request body beside its prompt: tools, a schema, names of fields."""

BODY_BYTES_PER_TOKEN = 32
"""Bytes that a token of the context may take in a body: as text with its escapes, or as a number of several prompts."""

MOST_BODY_BYTES = 8 << 20
"""Bytes of the longest body that is accepted where no limit was set, for any context."""


LARGE_OF_A_CLIENT, LARGE = 8, 32
"""Requests with large bodies that are in memory at once: of one client, and of all."""

FORM_BYTES = 64 << 10
"""Bytes of an upload beside its file: names and fields of its form."""

PARSING_THREADS = 2
"""Threads that parse and tokenise large bodies; one of them at most works for the same client."""


FETCHING_THREADS = 8
"""Threads that fetch images; one of them at most works for the same client."""


@dataclass(frozen=True)
class Settings:
    """Settings of the server.

    Args:
        model_name: Name of the model for clients; of several, the one that is meant where a request names none.
        api_keys: Accepted API keys, as they are or with a name and limits; without any, no key is needed.
        max_body_bytes: Longest request body; None for a limit that follows from the length of the model's context.
        request_timeout: Seconds a request may take, waiting included; None for no limit. Requests may set a shorter
            ``timeout``.
        drain_timeout: Seconds that running requests have to finish after SIGTERM.
        engine: Limits and batching of the engine.
        tool_parser: Format of the model's tool calls, "auto" for that of its chat template, or "none".
        reasoning_parser: Format of its reasoning, alike.
        telemetry: Whether requests have OpenTelemetry's spans.
        keep_alive: Seconds without requests after which a model is unloaded; None: never.
        load_timeout: Seconds that a request waits for its model to be loaded, where models come and go.
        adapters: Names of the LoRA adapters that the model is loaded with: requests name them as models. Those of
            several models are theirs: see `create_app`.
        batches: Whether there are files and batches.
        batch_folder: Where they are, so that a later start goes on with them; None for a folder that goes with the
            server.
        batch_folder_bytes: Most bytes of all files in it.
        image_hosts: Hosts that images are fetched from, see :class:`bigmodel.server.text.image_urls.ImageHosts`.
        allowed_origins: Origins of pages that may call the server from a browser, or "*" for all; none by default.

    Raises:
        ServeError: A key is empty, or begins or ends with a space, there is no such parser, an adapter has the model's
            name, no body is short enough, or a host for images is none, or an origin is none.
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
    keep_alive: float | None = None
    load_timeout: float = 120.0
    adapters: tuple[str, ...] = ()
    batches: bool = True
    batch_folder: Path | None = None
    batch_folder_bytes: int = STORE_BYTES
    image_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self.tool_parser, self.reasoning_parser)
        self.named_keys  # noqa: B018  # raises for a wrong one
        if self.model_name in self.adapters:
            raise ServeError(f"an adapter is called '{self.model_name}' as the model is; give it another name")
        if self.max_body_bytes == 0:
            raise ServeError("a limit of 0 bytes refuses every body; give more, or none for a limit by the context")
        ImageHosts(self.image_hosts)
        check_origins(self.allowed_origins)

    @property
    def named_keys(self) -> tuple[ApiKey, ...]:
        """The accepted keys, each with its name and limits."""
        return tuple(key if isinstance(key, ApiKey) else ApiKey.of(key) for key in self.api_keys)


class Reporter(Protocol):
    """Answers GET /metrics and GET /plan. A process that is one of several may replace it, to answer for all."""

    def metrics(self) -> bytes:
        """Metrics in the format of Prometheus."""
        ...

    def plan(self, model: str | None = None) -> dict[str, Any]:
        """The body of GET /plan, about a model; None for the first."""
        ...


@dataclass
class ServerState:
    """State of one application.

    Args:
        settings: Settings of the server.
        pool: Its models; None for one that has the name of the settings, and is not loaded.
    """

    settings: Settings
    pool: ModelPool = None  # type: ignore[assignment]  # never after the constructor
    failure: BaseException | None = None
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Any = None  # Metrics or MetricsOfModels, set by the application
    reporter: Reporter | None = None  # set by the application
    telemetry: Telemetry | None = None  # set by the application
    batches: Batches | None = None  # set by the application, where there are any
    keys: KeyRing = field(default_factory=lambda: KeyRing(()))  # set by the application
    large: Shares = field(default_factory=lambda: Shares(LARGE_OF_A_CLIENT, LARGE))
    parsing: Shares = field(default_factory=lambda: Shares(1, PARSING_THREADS))
    compiling: Shares = field(default_factory=lambda: Shares(1, 1))  # the worker compiles one schema at a time
    fetching: Shares = field(default_factory=lambda: Shares(1, FETCHING_THREADS))
    _relay: Relay | None = None

    def __post_init__(self) -> None:
        self.image_hosts = ImageHosts(self.settings.image_hosts) if self.settings.image_hosts else None
        if self.pool is None:
            self.pool = ModelPool([ServedModel(self.settings.model_name, adapters=self.settings.adapters)])
        self.models = self.pool.models
        self.first = self.pool.first
        self.adapters: dict[str, ServedModel] = {}
        for served in self.models.values():
            for name in served.adapters:
                if name in self.models or name in self.adapters:
                    raise ServeError(f"an adapter of '{served.name}' is called '{name}' as another is; rename it")
                self.adapters[name] = served

    @property
    def several(self) -> bool:
        """Whether the server has more than one model."""
        return len(self.models) > 1

    @property
    def longest(self) -> int:
        """Tokens of the longest text that a model takes: 0 while a lone one loads, and any number while others do."""
        unknown = MOST_BODY_BYTES // BODY_BYTES_PER_TOKEN if self.several else 0
        return max(served.longest or unknown for served in self.models.values())

    @property
    def body_limit(self) -> int:
        """Bytes of the longest request body: while a model loads, that of any model."""
        if self.settings.max_body_bytes is not None:
            return self.settings.max_body_bytes
        for served in self.models.values():
            if served.running is None or not served.running.engine.core.generates:
                return MOST_BODY_BYTES  # batches of many texts, each of which is bounded
        return self.text_limit

    @property
    def upload_limit(self) -> int:
        """Bytes of the longest body with a file."""
        return FORM_BYTES + (0 if self.batches is None else self.batches.limits.file_bytes)

    @property
    def text_limit(self) -> int:
        """Bytes of the longest text in a request body: more than any prompt that fits the context needs."""
        longest = 0
        for served in self.models.values():
            if served.running is None or served.running.images is not None:
                return MOST_BODY_BYTES
            longest = max(longest, served.running.engine.core.max_length)
        return min(BODY_BYTES + BODY_BYTES_PER_TOKEN * longest, MOST_BODY_BYTES)

    def mailbox(self, *, at_once: bool = False) -> Mailbox:
        """A mailbox of the running event loop; ``at_once`` for responses that are not streamed."""
        if self._relay is None:
            self._relay = Relay(asyncio.get_running_loop())
        return Mailbox(self._relay, at_once=at_once)

    @property
    def failed(self) -> bool:
        """Whether an engine has failed, or loading the only model."""
        loaded = [served.running for served in self.models.values() if served.running is not None]
        return self.failure is not None or any(not running.engine.healthy for running in loaded)

    @property
    def loading(self) -> bool:
        """Whether the first model is being loaded at the start."""
        return not self.pool.started and self.first.running is None

    @asynccontextmanager
    async def model(
        self, http: HTTPRequest, name: str | None, *, generating: bool = True
    ) -> AsyncIterator[RunningModel]:
        """The model that a request names, which stays loaded within the context.

        After it, what the model's engine has accepted keeps it.

        Args:
            http: The request. It waits for a model that is not loaded, where models come and go.
            name: Of the model; None for the first.
            generating: Whether it must be one that generates text.

        Raises:
            APIError: 503 while there is no engine, and for an adapter that its model was loaded without; 404 for a name
                that no model has, 400 for a model that generates no text.
            ClientGoneError: The client left meanwhile.
        """
        self.refuse_if_closed()
        served = self.first if name is None or not self.several else {**self.adapters, **self.models}.get(name)
        if served is None:
            raise self._unknown(name)
        if served.running is None or served.closing:
            await self._loaded(served, http)
        else:
            served.leases += 1
        try:
            running = served.running
            assert running is not None
            if generating and not running.engine.core.generates:
                why = f"'{served.name}' generates no text; it gives embeddings or scores"
                raise APIError(400, why, param="model", code="model_not_supported")
            self.check_model(name)
            if name in self.adapters and name not in running.adapters:
                why = f"the adapter '{name}' was not loaded with '{served.name}'; the server's log says why"
                raise APIError(503, why, param="model", code="loading_failed")
            yield running
        finally:
            served.leases -= 1
            served.last_used = time.monotonic()

    def refuse_if_closed(self) -> None:
        """Raise a 503 where nothing more is taken."""
        if self.draining:
            raise APIError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        if self.failed:
            raise APIError(503, "the engine has stopped", code="engine_stopped")

    async def _loaded(self, served: ServedModel, http: HTTPRequest) -> None:
        """Take a lease of a model once it is loaded."""
        patience = self.pool.patience
        if not patience:
            why = f"the model is loading ({served.loading.stage})"
            raise APIError(503, why, code="loading", headers={"Retry-After": "5"})
        if self.settings.request_timeout is not None:
            patience = min(patience, self.settings.request_timeout)
        try:
            await unless_disconnected(http.receive, self.pool.acquire(served, patience=patience))
        except PoolClosedError as error:
            raise APIError(503, str(error), code="draining", headers={"Retry-After": "5"}) from error
        except TookTooLongError as error:
            raise APIError(503, str(error), code="loading", headers={"Retry-After": "5"}) from error
        except LoadFailedError as error:
            why = f"{error}; the server's log says why, and the next request tries again"
            raise APIError(503, why, param="model", code="loading_failed") from error

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a request names as its model; "" where it names none."""
        return name if name is not None and name in self.adapters else ""

    def check_model(self, name: str | None) -> None:
        """Raise a 404 unless ``name`` is that of a model."""
        if name is not None and name not in self.models and name not in self.adapters:
            raise self._unknown(name)

    def _unknown(self, name: str | None) -> APIError:
        known = ", ".join(f"'{each}'" for each in (*self.models, *self.adapters))
        why = f"the model '{name}' does not exist; this server has {known}"
        return APIError(404, why, param="model", code="model_not_found")


def state_of(http: HTTPRequest) -> ServerState:
    """State of the application that a request came to."""
    state: ServerState = http.app.state.server
    return state
