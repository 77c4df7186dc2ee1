"""The engine's thread-safe interface: submit, cancel, drain, stop. The model runs in a separate thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

from bigmodel.errors import NodeLostError, ServeError
from bigmodel.server.engine.core import EngineCore
from bigmodel.server.engine.kv.host_pages import HostPages
from bigmodel.server.engine.scheduling.request import Delta, Event, Request, Sink

logger = logging.getLogger(__name__)

WRITE_SECONDS = 0.02
"""How often an idle engine looks whether files of the prefix cache accept more blocks."""


class QueueFullError(ServeError):
    """The engine has reached its limit of unfinished sequences."""


class EngineStoppedError(ServeError):
    """The engine accepts no requests: it is draining, stopped or failed."""


class State(Enum):
    """The state of the engine."""

    NEW = "new"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Cancel:
    """Message to the thread: end a request."""

    request: Request


@dataclass(frozen=True)
class Wake:
    """Message to the thread: check the state again."""


class Engine:
    """Runs an :class:`EngineCore` in a thread.

    ``max_requests`` bounds the sequences accepted and not finished, running ones included; past it :meth:`submit`
    raises :class:`QueueFullError`. ``on_failure`` is called once, from the engine's thread, when a step raises; every
    request has been failed by then. Steps are computed within the context that ``around_step`` returns. ``pages`` are
    those of keys and values on the host.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        max_requests: int,
        kv_bytes_per_token: Mapping[str, int] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        around_step: Callable[[], AbstractContextManager[None]] = nullcontext,
        pages: HostPages | None = None,
    ) -> None:
        self.core = core
        self.pages = pages
        self.max_requests = max_requests
        self.kv_bytes_per_token = dict(kv_bytes_per_token or {})
        self.state = State.NEW
        self.failure: BaseException | None = None
        self.idle_since = time.monotonic()
        """When the last accepted request ended."""
        self._on_failure = on_failure
        self._around_step = around_step
        self._inbox: queue.SimpleQueue[Request | Cancel | Wake] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._accepted: dict[str, int] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bigmodel-engine", daemon=True)

    # --- called from any thread -------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self.state = State.RUNNING
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and takes or finishes requests."""
        return self.state in (State.RUNNING, State.DRAINING) and self._thread.is_alive()

    @property
    def unfinished(self) -> int:
        """Sequences accepted and not finished."""
        with self._lock:
            return sum(self._accepted.values())

    @property
    def waiting(self) -> int:
        """Sequences accepted that do not run yet."""
        return max(0, self.unfinished - len(self.core.scheduler.running))

    def submit(self, request: Request) -> None:
        """Queue a request; its events arrive at ``request.sink``.

        Raises :class:`QueueFullError` or :class:`EngineStoppedError`; the request is then not accepted.
        """
        with self._lock:
            if self.state is not State.RUNNING:
                raise EngineStoppedError(f"the engine is {self.state.value} and takes no new requests")
            held = sum(self._accepted.values())
            if held + request.n > self.max_requests:
                raise QueueFullError(f"{held} requests are running or waiting; at most {self.max_requests} may")
            self._accepted[request.request_id] = request.n
            request.sink = _CountingSink(request.sink, self, request.request_id)
            self._inbox.put(request)

    def cancel(self, request: Request) -> None:
        """End a request early; its memory is free before the next step."""
        self._inbox.put(Cancel(request))

    def drain(self, timeout: float) -> bool:
        """Accept no new requests and wait up to ``timeout`` seconds for the accepted ones; whether all finished."""
        with self._lock:
            if self.state is State.RUNNING:
                self.state = State.DRAINING
        deadline = time.monotonic() + timeout
        while self.unfinished and self.healthy and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.unfinished

    def stop(self) -> None:
        """End the thread and fail all unfinished requests. Idempotent."""
        self._stopping = True
        self._inbox.put(Wake())
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def release(self) -> None:
        """Forget the model, its keys and values, once stopped: responses that are still being sent hold the engine."""
        del self.core
        self.pages = None

    def released(self, request_id: str) -> None:
        """Called when a request has sent its last event."""
        with self._lock:
            self._accepted.pop(request_id, None)
            self.idle_since = time.monotonic()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._receive()
                self.core.expire(time.monotonic())
                if not self._stopping:
                    with self._around_step():
                        self.core.step()
        except BaseException as error:
            logger.exception("the engine failed; all its requests are failed")
            self._close(State.FAILED, error)
        else:
            self._close(State.STOPPED, None)

    def _receive(self) -> None:
        """Process messages; block for one while there is nothing to compute, and nothing to write."""
        prefix = self.core.scheduler.prefix
        block = self.core.idle
        while not self._stopping:
            try:
                message = self._inbox.get(block=block, timeout=WRITE_SECONDS if prefix.unwritten else None)
            except queue.Empty:
                if not block:
                    return
                prefix.write()
                continue
            block = False
            if isinstance(message, Request):
                self.core.add(message)
            elif isinstance(message, Cancel):
                self.core.fail(message.request, "cancelled", "the request was cancelled")
                block = self.core.idle

    def _close(self, state: State, error: BaseException | None) -> None:
        with self._lock:
            self.state = state
            self.failure = error
        while True:  # requests queued but never taken in
            try:
                message = self._inbox.get(block=False)
            except queue.Empty:
                break
            if isinstance(message, Request):
                self.core.add(message)
        kind, why = "engine", "the engine stopped before the request was finished"
        if isinstance(error, NodeLostError):
            kind, why = "node_lost", str(error)
        for request in list(self.core.requests.values()):
            self.core.fail(request, kind, why)
        self.core.close()
        self.core.scheduler.prefix.close(lost=error is not None)
        if error is not None and self._on_failure is not None:
            self._on_failure(error)


class _CountingSink:
    """Forwards events, and tells the engine when the last one was sent."""

    def __init__(self, inner: Sink, engine: Engine, request_id: str) -> None:
        self._put = inner.put
        self._engine = engine
        self._request_id = request_id

    def put(self, event: Event, /) -> None:
        if not isinstance(event, Delta):
            self._engine.released(self._request_id)
        self._put(event)
