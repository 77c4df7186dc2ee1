"""The application: routes over one engine, which exists from the start or is loaded in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from bigmodel import __version__
from bigmodel.errors import BigModelError
from bigmodel.server.engine.build import build_engine
from bigmodel.server.http import (
    chat_requests,
    completions_routes,
    embeddings_routes,
    get_routes,
    messages_routes,
    reference,
    rerank_routes,
    responses_routes,
    tokenize_routes,
)
from bigmodel.server.http.client_limits import BodyLimit, KeyGuard, RequestIds
from bigmodel.server.http.errors import install
from bigmodel.server.http.keys import KeyRing
from bigmodel.server.http.metrics import Metrics
from bigmodel.server.http.respond import ClientGoneError
from bigmodel.server.http.state import ServerState, Settings
from bigmodel.server.http.status import OwnReports
from bigmodel.server.http.telemetry import Telemetry
from bigmodel.server.loading import Loaded, Loader, LoadingCancelledError
from bigmodel.server.text.codec import TextCodec

logger = logging.getLogger(__name__)

_ROUTES = (
    chat_requests,
    completions_routes,
    responses_routes,
    messages_routes,
    embeddings_routes,
    rerank_routes,
    tokenize_routes,
    get_routes,
    reference,
)
_PATIENCE = 5.0  # seconds that a cancelled loader has to end


def create_app(
    model: Any = None,
    tokenizer: Any = None,
    plan: Any = None,
    *,
    loader: Loader | None = None,
    settings: Settings | None = None,
    model_name: str | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        model: A causal language model, dispatched or plain; with ``tokenizer``, the alternative to ``loader``.
        tokenizer: Its transformers tokenizer.
        plan: The plan that the model was placed by.
        loader: Loads the model in a thread once the application starts; ``/ready`` answers 503 until it is done.
        settings: Settings of the server.
        model_name: Name of the model for clients; overrides that of the settings.
        on_failure: Called from another thread when loading or the engine fails.

    Raises:
        ValueError: Neither or both of model and loader are given.
    """
    if (model is None) == (loader is None):
        raise ValueError("give either model and tokenizer, or a loader")
    settings = settings or Settings(model_name or "bigmodel")
    if model_name is not None:
        settings = replace(settings, model_name=model_name)
    state = ServerState(settings)
    state.metrics = Metrics(state)
    state.reporter = OwnReports(state)
    startup = _Startup(state, loader or (lambda _: Loaded(model, tokenizer, plan)), on_failure)
    if loader is None:
        startup.build()

    # FastAPI's own pages load scripts from elsewhere.
    app = FastAPI(title="bigmodel", version=__version__, lifespan=startup.lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    install(app)
    app.add_exception_handler(ClientGoneError, lambda request, error: Response(status_code=499))
    for routes in _ROUTES:
        app.include_router(routes.router)
    app.add_middleware(BodyLimit, limits=state)
    if settings.api_keys:
        state.keys = KeyRing(settings.named_keys)
        app.add_middleware(KeyGuard, keys=state.keys)
    app.add_middleware(RequestIds)
    if settings.telemetry:
        state.telemetry = Telemetry(settings.model_name)
        app.add_middleware(state.telemetry.around)
    return app


class _Startup:
    """Starts the engine with the application, at once or in the background, and stops it with it."""

    def __init__(self, state: ServerState, loader: Loader, on_failure: Callable[[BaseException], None] | None) -> None:
        self._state = state
        self._loader = loader
        self._on_failure = on_failure

    def build(self, *, start: bool = False) -> None:
        """Load the model and build its engine; with ``start`` the engine runs before it becomes visible to routes."""
        state = self._state
        loaded = self._loader(state.loading)
        state.loading.begin("preparing the engine")
        codec = TextCodec(loaded.tokenizer)
        engine = build_engine(
            loaded.model,
            codec,
            loaded.plan,
            state.settings.engine,
            draft_model=loaded.draft_model,
            checkpoint=loaded.checkpoint,
            observer=state.metrics,
            on_failure=self._failed,
        )
        if state.on_loaded is not None:
            state.on_loaded()
        if start and not state.draining:
            engine.start()
        state.images = loaded.images
        state.model, state.plan, state.codec, state.engine = loaded.model, loaded.plan, codec, engine

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """The lifespan of the application."""
        state = self._state
        if state.engine is not None:
            state.engine.start()
        else:
            state.loader = threading.Thread(target=self._load, name="bigmodel-loader", daemon=True)
            state.loader.start()
        try:
            yield
        finally:
            state.draining = state.loading.cancelled = True
            if state.loader is not None:
                await asyncio.to_thread(state.loader.join, _PATIENCE)
            if state.engine is not None:
                await asyncio.to_thread(state.engine.stop)
            await asyncio.to_thread(state.close)
            if state.telemetry is not None:
                await asyncio.to_thread(state.telemetry.close)

    def _load(self) -> None:
        try:
            self.build(start=True)
        except LoadingCancelledError:
            return
        except BaseException as error:
            # Our own errors need no traceback; the caller of the server reports them.
            logger.error("loading failed", exc_info=None if isinstance(error, BigModelError) else error)
            self._failed(error)
            return
        engine = self._state.engine
        if engine is not None and engine.healthy:
            core = engine.core
            logger.info("ready: %d sequences at once, %d tokens each", core.scheduler.max_sequences, core.max_length)

    def _failed(self, error: BaseException) -> None:
        self._state.failure = error
        if self._on_failure is not None:
            self._on_failure(error)
