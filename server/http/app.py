"""The application: routes over one model, which exists from the start or is loaded in the background, or several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response

from bigmodel import __version__
from bigmodel.devices.default_dtype import computing_beside_builds
from bigmodel.server.engine.budget import EngineOptions
from bigmodel.server.engine.scheduling.request import Observer
from bigmodel.server.http import (
    batches_routes,
    chat_requests,
    completions_routes,
    embeddings_routes,
    files_routes,
    get_routes,
    messages_routes,
    reference,
    rerank_routes,
    responses_routes,
    tokenize_routes,
)
from bigmodel.server.http.batch_calls import batches_of
from bigmodel.server.http.client_limits import BodyLimit, KeyGuard, RequestIds
from bigmodel.server.http.errors import install
from bigmodel.server.http.keys import KeyRing
from bigmodel.server.http.metrics import Metrics
from bigmodel.server.http.metrics_of_models import MetricsOfModels
from bigmodel.server.http.origins import cors
from bigmodel.server.http.respond import ClientGoneError
from bigmodel.server.http.state import ServerState, Settings
from bigmodel.server.http.status import OwnReports
from bigmodel.server.http.telemetry import Telemetry
from bigmodel.server.loading import Loaded, Loader, PlannedModel
from bigmodel.server.models.pool import ModelPool
from bigmodel.server.models.running import RunningModel
from bigmodel.server.models.served import ServedModel

_ROUTES = (
    chat_requests,
    completions_routes,
    responses_routes,
    messages_routes,
    embeddings_routes,
    rerank_routes,
    tokenize_routes,
    files_routes,
    batches_routes,
    get_routes,
    reference,
)


def create_app(
    model: Any = None,
    tokenizer: Any = None,
    plan: Any = None,
    *,
    loader: Loader | None = None,
    models: Mapping[str, PlannedModel] | None = None,
    budgets: Mapping[int | str, int] | None = None,
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
        models: Several models by name, the alternative to both: the first is loaded once the application starts, others
            when a request asks for them. Those that do not fit beside one that is asked for are unloaded.
        budgets: Bytes of each device for all ``models`` together, as `server_budgets` returns them.
        settings: Settings of the server.
        model_name: Name of the model for clients; overrides that of the settings.
        on_failure: Called when loading the only model for the first time, or an engine, fails: from any thread.

    Raises:
        ValueError: Not exactly one of model, loader and models is given, models without budgets, or models beside the
            settings' adapters.
        ServeError: The folder of batches cannot be used, another server uses it, or two adapters or an adapter and a
            model have one name.
    """
    if [model is None, loader is None, models is None].count(False) != 1:
        raise ValueError("give either model and tokenizer, or a loader, or models")
    if models is not None and not budgets:
        raise ValueError("several models need budgets, as server_budgets returns them")
    settings = settings or Settings(model_name or "bigmodel")
    if models is not None and settings.adapters:
        raise ValueError("each of several models has its own adapters: give them to PlannedModel")
    if models is not None:
        model_name = next(iter(models))
    if model_name is not None:
        settings = replace(settings, model_name=model_name)
    if model is not None and settings.keep_alive is not None:
        raise ValueError("a model that is given cannot be loaded again: keep_alive needs a loader, or models")
    sources: Mapping[str, Loader | PlannedModel] = models or {
        settings.model_name: loader or (lambda _: Loaded(model, tokenizer, plan))
    }
    served = [
        ServedModel(
            name,
            source,
            options=settings.engine,
            adapters=tuple(source.adapters) if isinstance(source, PlannedModel) else settings.adapters,
        )
        for name, source in sources.items()
    ]
    waits = len(served) > 1 or settings.keep_alive is not None
    pool = ModelPool(served, budgets, patience=settings.load_timeout if waits else 0.0, keep_alive=settings.keep_alive)
    state = ServerState(settings, pool)
    startup = _Startup(state, on_failure)
    if model is not None:
        startup.build()

    # FastAPI's own pages load scripts from elsewhere.
    app = FastAPI(title="bigmodel", version=__version__, lifespan=startup.lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    install(app)
    app.add_exception_handler(ClientGoneError, lambda request, error: Response(status_code=499))
    for routes in _ROUTES:
        app.include_router(routes.router)
        _answer_head(app, routes.router)
    app.add_middleware(BodyLimit, limits=state)
    if settings.api_keys:
        state.keys = KeyRing(settings.named_keys)
        app.add_middleware(KeyGuard, keys=state.keys)
    if settings.allowed_origins:
        app.add_middleware(cors, origins=settings.allowed_origins)  # before keys: preflights have none
    app.add_middleware(RequestIds)
    if settings.batches:
        state.batches = batches_of(app, state)
    if settings.telemetry:
        state.telemetry = Telemetry()
        app.add_middleware(state.telemetry.around)
    return app


def _answer_head(app: FastAPI, router: APIRouter) -> None:
    """Have routes with GET answer HEAD, too: FastAPI's have the methods that they name, and no others.

    The server leaves the body out of such answers.
    """
    for route in router.routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], response_model=None, include_in_schema=False
            )


class _Startup:
    """Starts the models with the application, at once or in the background, and stops them with it."""

    def __init__(self, state: ServerState, on_failure: Callable[[BaseException], None] | None) -> None:
        self._state = state
        self._on_failure = on_failure
        metrics = {served.name: Metrics(state, served) for served in state.models.values()}
        state.metrics = MetricsOfModels(state, metrics) if state.several else metrics[state.first.name]
        state.reporter = OwnReports(state)
        # A lone model computes while none is built.
        beside = computing_beside_builds if state.several else nullcontext
        for served in state.models.values():
            served.start = partial(self._running, served.name, metrics[served.name], beside)
        state.pool.on_failure = self._not_loaded

    def _running(
        self,
        name: str,
        observer: Observer,
        around_step: Callable[[], AbstractContextManager[None]],
        loaded: Loaded,
        options: EngineOptions,
    ) -> RunningModel:
        settings = self._state.settings
        return RunningModel.of(
            name,
            loaded,
            options,
            observer,
            self._failed,
            around_step,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
        )

    def build(self) -> None:
        """Build the engine of a model that is there, to be started with the application."""
        self._state.first.load({}, {}, lambda: False)
        self._state.pool.started = True

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """The lifespan of the application."""
        state = self._state
        state.pool.start()
        if state.batches is not None:
            state.batches.start()
        try:
            yield
        finally:
            state.draining = True
            if state.batches is not None:
                await state.batches.stop()
            await state.pool.close()
            if state.telemetry is not None:
                await asyncio.to_thread(state.telemetry.close)

    def _not_loaded(self, error: BaseException) -> None:
        """Loading a model has failed: that of the only one at the start is the end. Later ones are tried again."""
        if not (self._state.several or self._state.pool.started):
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        self._state.failure = error
        if self._on_failure is not None:
            self._on_failure(error)
