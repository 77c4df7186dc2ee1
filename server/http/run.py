"""Run the application: socket, signals, draining, access log, exit code."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import resource
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from bigmodel.errors import ServeError
from bigmodel.server.http.client_limits import CONNECTIONS, HEADER_BYTES, BoundedProtocol, request_id
from bigmodel.server.http.process_memory import return_beside_the_next_load, return_freed_memory, use_few_arenas
from bigmodel.server.http.state import ServerState
from bigmodel.server.models.garbage import exempt_nothing, keep_what_is_loaded

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
"""How long /health answers 503 after a failure, before the process exits."""

CUT_SECONDS = 4.0
"""How long connections stay open once what runs has ended: for clients that are slow to send or to read."""

TRIM_SECONDS = 0.5
"""How often at most the memory that large requests free is returned to the system."""


POLLED = frozenset({"/health", "/ready", "/plan", "/metrics"})  # by pages, probes and scrapers, every second


class WithoutPolling(logging.Filter):
    """Filter of uvicorn's access log: drops successful requests of polled paths, except at level debug."""

    def filter(self, record: logging.LogRecord) -> bool:
        _client, _method, path, _version, status = cast(tuple[str, str, str, str, int], record.args)
        polled = path.partition("?")[0] in POLLED and status < 400
        return not polled or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


class WithRequestId(logging.Filter):
    """Gives records of uvicorn's access log the id of their request."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


_WITHOUT_POLLING = WithoutPolling()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Of a name with several addresses it is one of IPv4, if there is one.

    Raises ServeError when that fails.
    """
    if not 0 <= port <= 65535:
        raise ServeError(f"{port} is no port; ports are 0 (any free one) to 65535")
    name = _without_brackets(host)
    if not name:  # to the system that is every address: a variable that is not set must open no server to others
        raise ServeError("the host is empty; name the address to listen on: 127.0.0.1, or 0.0.0.0 for all")
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise ServeError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    return listener


def _without_brackets(host: str) -> str:
    """A host as the system takes it: in URLs, addresses of IPv6 are in brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def url(host: str, port: int) -> str:
    """The URL of a server that listens on ``host``."""
    name = _without_brackets(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def server_config(app: FastAPI, **options: Any) -> uvicorn.Config:
    """Return uvicorn's configuration for the application, with bounded connections."""
    log = copy.deepcopy(LOGGING_CONFIG)
    log["formatters"]["access"]["fmt"] += " %(request_id)s"
    log["filters"] = {"request_id": {"()": WithRequestId}}
    log["handlers"]["access"]["filters"] = ["request_id"]
    options.setdefault("log_config", log)
    return uvicorn.Config(
        app, http=BoundedProtocol, ws="none", h11_max_incomplete_event_size=HEADER_BYTES, lifespan="on", **options
    )


def run(app: FastAPI, listener: socket.socket, *, log_level: str = "info") -> int:
    """Serve until a signal or a failure; returns the exit code.

    SIGTERM or SIGINT: no new requests; accepted ones may finish within the drain timeout, then 0, or 130 after SIGINT.
    A second signal ends at once. When loading or the engine fails: 1.
    """
    state: ServerState = app.state.server
    use_few_arenas()
    state.pool.on_loaded, state.pool.on_unloaded = keep_what_is_loaded, return_beside_the_next_load
    config = server_config(app, log_level=log_level, timeout_graceful_shutdown=int(CUT_SECONDS) + 1)
    logging.getLogger("uvicorn.access").addFilter(_WITHOUT_POLLING)
    _allow_files(2 * CONNECTIONS)
    server = DrainingServer(config, state)
    threading.Thread(target=server.watch_for_failure, name="bigmodel-watch", daemon=True).start()
    threading.Thread(target=server.trim, name="bigmodel-trim", daemon=True).start()
    server.run(sockets=[listener])
    exempt_nothing()
    code = 1 if state.failure is not None else 130 if server.interrupted else 0
    if state.pool.busy:
        # The loader cannot be interrupted in a download or a long computation: exit without waiting for it.
        logging.shutdown()
        os._exit(code)
    return code


def _allow_files(number: int) -> None:
    """Let the process have so many files and connections open, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class DrainingServer(uvicorn.Server):
    """Drains the engine between a signal and the end of the server."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self.interrupted = False
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end now. Not passed on to uvicorn, which would raise it again afterwards."""
        name = signal.Signals(sig).name
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self._state.draining:
            logger.warning("%s again: ending at once", name)
            # Connections are cut on purpose: no traceback for each.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.force_exit = self.should_exit = True
            return
        self._state.draining = True
        logger.info("%s: finishing what runs, within %g s", name, self._state.settings.drain_timeout)
        threading.Thread(target=self._drain, name="bigmodel-drain", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is open; cut connections that do not close by themselves, before uvicorn cancels their tasks."""
        cut = asyncio.get_running_loop().call_later(CUT_SECONDS, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut(self) -> None:
        left = [connection.transport for connection in self.server_state.connections]
        if left:
            logger.warning("%d connections are cut: their clients neither sent nor read in time", len(left))
        for transport in left:
            transport.abort()

    def watch_for_failure(self) -> None:
        """End the server soon after the engine or the loader has failed."""
        while self._state.failure is None and not self.should_exit:
            time.sleep(0.05)
        if self._state.failure is not None:
            time.sleep(LINGER_SECONDS)
            self.should_exit = True

    def trim(self) -> None:
        """Return the memory that large requests and compiled schemas free to the system: while such requests are
        answered, and after some have ended."""
        trimmed = 0
        while not self.should_exit:
            time.sleep(TRIM_SECONDS)
            ended = self._state.large.ended + self._state.compiling.ended
            if ended != trimmed or not self._state.large.idle:
                return_freed_memory()
                trimmed = ended

    def _drain(self) -> None:
        pool, until = self._state.pool, time.monotonic() + self._state.settings.drain_timeout
        if self._state.batches is not None:
            self._state.batches.leave_soon()  # a later start answers what is left of them
        pool.refuse()
        for running in pool.running:
            running.engine.drain(0.0)  # none takes requests while another is waited for
        for running in pool.running:
            finished = running.engine.drain(max(0.0, until - time.monotonic()))
            if not finished and not self.force_exit:  # a second signal has said so, and ends it
                logger.warning("%d requests did not finish in time and are ended", running.engine.unfinished)
                running.engine.stop()  # before the connections close, so that clients receive the error
        self.should_exit = True
