"""What the routes share: settings, the engine once it is there, the tokenizer, the plan."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from bigmodel.devices import accelerators, memory_allocated
from bigmodel.errors import ServeError
from bigmodel.server.engine import Engine, EngineOptions
from bigmodel.server.engine.grammar import GrammarCompiler
from bigmodel.server.errors import APIError
from bigmodel.server.fleet import Fleet
from bigmodel.server.mailbox import Mailbox, Relay
from bigmodel.server.text.codec import TextCodec


@dataclass(frozen=True)
class Settings:
    """How the server behaves. Sizes in bytes, times in seconds.

    ``api_keys``: any of them opens the API; none: it is open. ``request_timeout``: the longest a request may
    take, waiting included (None: as long as it takes); a request may ask for less with ``timeout``.
    Raises ServeError for a key that would open to nobody, or to everybody.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    request_timeout: float | None = None
    drain_timeout: float = 30.0
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or key != key.strip():
                raise ServeError("an API key is empty, or begins or ends with a space; no client could send it")


class LoadingCancelledError(ServeError):
    """The server was told to stop while its model was loading."""


@dataclass
class Loading:
    """How far loading has come. ``fraction`` from 0 to 1, None when unknown.

    ``before``: bytes that were in use on each device before the model came, where that was measured.
    Once ``cancelled`` is set, the next word about progress raises :class:`LoadingCancelledError`.
    """

    stage: str = "starting"
    fraction: float | None = None
    before: dict[str, int] = field(default_factory=dict)
    cancelled: bool = False

    def begin(self, stage: str) -> None:
        """A new stage, of which nothing is known yet."""
        self._go_on()
        self.fraction = None
        self.stage = stage

    def report(self, done: int, total: int) -> None:
        """So many of the bytes of this stage are done."""
        self._go_on()
        self.fraction = done / total if total else 1.0

    def measure(self) -> None:
        """Note what is in use now, before the model comes."""
        self.before = {device: memory_allocated(device) for device in ("cpu", *accelerators())}

    def _go_on(self) -> None:
        if self.cancelled:
            raise LoadingCancelledError("loading was cancelled")


@dataclass
class ServerState:
    """Everything a route needs. ``engine`` and ``codec`` are None while the model loads."""

    settings: Settings
    engine: Engine | None = None
    codec: TextCodec | None = None
    model: Any = None
    plan: Any = None
    weights: dict[str, int] | None = None  # bytes per device, counted when first asked for
    loading: Loading = field(default_factory=Loading)
    loader: threading.Thread | None = None  # while the model loads in the background
    failure: BaseException | None = None
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Any = None
    fleet: Fleet | None = None  # all replicas, where there are several
    _relay: Relay | None = None
    _grammars: GrammarCompiler | None = None
    _grammar_lock: threading.Lock = field(default_factory=threading.Lock)

    def mailbox(self, *, at_once: bool = False) -> Mailbox:
        """A mailbox of the running event loop; ``at_once`` where the answer is not streamed."""
        if self._relay is None:
            self._relay = Relay(asyncio.get_running_loop())
        return Mailbox(self._relay, at_once=at_once)

    def grammar_compiler(self) -> GrammarCompiler:
        """The compiler of answer formats, made when first asked for. May be called from any thread."""
        with self._grammar_lock:
            if self._grammars is None:
                assert self.engine is not None
                assert self.codec is not None
                core = self.engine.core
                self._grammars = GrammarCompiler(self.codec.tokenizer, core.vocabulary_size, core.eos_ids)
            return self._grammars

    def ready_engine(self) -> tuple[Engine, TextCodec]:
        """The engine and tokenizer, or 503 while they are not there."""
        if self.draining:
            raise APIError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        if self.failure is not None or (self.engine is not None and not self.engine.healthy):
            raise APIError(503, "the engine has stopped", code="engine_stopped")
        if self.engine is None or self.codec is None:
            raise APIError(
                503, f"the model is loading ({self.loading.stage})", code="loading", headers={"Retry-After": "5"}
            )
        return self.engine, self.codec

    def check_model(self, name: str | None) -> None:
        """404 unless ``name`` is the model served."""
        if name is not None and name != self.settings.model_name:
            raise APIError(
                404,
                f"the model '{name}' does not exist; this server has '{self.settings.model_name}'",
                param="model",
                code="model_not_found",
            )


def state_of(request: Request) -> ServerState:
    """The state of the app that a request came to."""
    state: ServerState = request.app.state.server
    return state


def usage(prompt: int, completion: int, cached: int) -> Mapping[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
