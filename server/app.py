"""The application: routes over one engine, which may be there from the start or loaded in the background."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI

from bigmodel import __version__
from bigmodel.errors import BigModelError
from bigmodel.server.engine import build_engine
from bigmodel.server.error_handlers import install
from bigmodel.server.guard import BodyLimit, KeyGuard
from bigmodel.server.metrics import Metrics
from bigmodel.server.routes import ROUTERS
from bigmodel.server.state import Loading, LoadingCancelledError, ServerState, Settings
from bigmodel.server.text.codec import TextCodec

logger = logging.getLogger(__name__)

_PATIENCE = 5.0  # seconds that a loader has to notice that it is no longer wanted


@dataclass(frozen=True)
class Loaded:
    """What a loader hands over; ``draft_model`` guesses tokens for the model to check."""

    model: Any
    tokenizer: Any
    plan: Any = None
    draft_model: Any = None


Loader = Callable[[Loading], Loaded]


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

    Give ``model`` and ``tokenizer`` (and the ``plan`` the model was placed by), or a ``loader`` that makes
    them; it runs in a thread once the application starts, reports to the :class:`Loading` it is given, and
    ``/ready`` answers 503 until it is done. ``model_name`` is what clients call the model. ``on_failure`` is
    called, from another thread, when loading or the engine fails.
    """
    if (model is None) == (loader is None):
        raise ValueError("give either model and tokenizer, or a loader")
    settings = settings or Settings(model_name or "bigmodel")
    if model_name is not None:
        settings = replace(settings, model_name=model_name)
    state = ServerState(settings)
    state.metrics = Metrics(state)
    start = _Start(state, loader or (lambda _: Loaded(model, tokenizer, plan)), on_failure)
    if loader is None:
        start.build()

    app = FastAPI(title="bigmodel", version=__version__, lifespan=start.lifespan)
    app.state.server = state
    install(app)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(KeyGuard, keys=settings.api_keys)
    return app


class _Start:
    """Brings the engine up, in the background or at once, and down again."""

    def __init__(self, state: ServerState, loader: Loader, on_failure: Callable[[BaseException], None] | None) -> None:
        self._state = state
        self._loader = loader
        self._on_failure = on_failure

    def build(self, *, start: bool = False) -> None:
        """Load the model and make its engine; with ``start`` it runs when others see it, unless nobody wants it now."""
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
            observer=state.metrics,
            on_failure=self._failed,
        )
        if start and not state.draining:
            engine.start()
        state.model, state.plan, state.codec, state.engine = loaded.model, loaded.plan, codec, engine

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start the engine with the application, stop it with it."""
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

    def _load(self) -> None:
        try:
            self.build(start=True)
        except LoadingCancelledError:
            return
        except BaseException as error:
            # Our own errors say all there is to say; whoever runs the server reports them.
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
