"""A real server on a free loopback port, for tests that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from bigmodel.server import Engine, EngineOptions, Settings, create_app
from bigmodel.server.http.run import server_config
from tests.server.tiny import tiny_model, tiny_tokenizer

MODEL = "tiny"


def tiny_app(model: Any = None, *, engine: dict[str, Any] | None = None, **settings: Any) -> FastAPI:
    """The application over the tiny model."""
    options = EngineOptions(**{"kv_bytes": 64 << 20, "max_sequences": 8, **(engine or {})})
    return create_app(model or tiny_model(), tiny_tokenizer(), settings=Settings(MODEL, engine=options, **settings))


def engine_of(app: FastAPI) -> Engine:
    """The engine of an application's first model, which is loaded."""
    running = app.state.server.first.running
    engine: Engine = running.engine
    return engine


class _Server(uvicorn.Server):
    def __init__(self, app: FastAPI) -> None:
        super().__init__(server_config(app, host="127.0.0.1", port=0, log_level="warning"))
        self.listening = threading.Event()

    async def main_loop(self) -> None:
        """Serve until `end`: the loop that this replaces looks ten times a second whether it has come."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        ticking = asyncio.ensure_future(super().main_loop())
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait([ticking, ended], return_when=asyncio.FIRST_COMPLETED)
        ticking.cancel()
        ended.cancel()

    def end(self) -> None:
        """Have it end, from any thread."""
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._ended.set)

    async def startup(self, *args: Any, **kwargs: Any) -> None:
        await super().startup(*args, **kwargs)
        self.listening.set()

    @property
    def port(self) -> int:
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve ``app`` in a thread; gives its URL."""
    server = _Server(app)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.listening.wait(100), "the server did not start"
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.end()
        thread.join(100)
        assert not thread.is_alive(), "the server did not stop"
