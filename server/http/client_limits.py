"""Limits for one client: size and time of connections, headers and bodies, and turns at scarce resources.

From the outside in: `BoundedProtocol` bounds connections before a key is checked, as anybody who reaches the port can
open them; `RequestIds` gives each request its name, for answers and logs; `KeyGuard` and `BodyLimit` look at a request
before any route does; `Shares` gives each client a few turns at
once at parsing and compiling, so that one with many requests delays another by one turn and not by all of them. A
client is a key, or an address where no keys are needed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, cast

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from bigmodel.server.http.errors import ANTHROPIC_PATHS, APIError, counted
from bigmodel.server.http.keys import KeyRing, TooMuchError

logger = logging.getLogger(__name__)

HEADER_BYTES = 32 << 10
"""Longest request line and headers."""

HEADER_SECONDS = 10.0
"""Time limit for the headers of a request, from its first byte or the start of its connection."""

BODY_SECONDS = 60.0
"""Time limit for the body of a request, from the end of its headers."""

UNREAD_SECONDS = 60.0
"""How long bytes may wait for a client that reads slowly or not at all, before its connection is cut: from when more
wait than the system keeps for it, until it has read most of them."""

READ_BYTES_PER_SECOND = 64 << 10
"""Rate of the slowest reader of a long answer: beyond `UNREAD_SECONDS`, it has a second for as many bytes that wait."""

UNSENT_BYTES = 128 << 10
"""Bytes that the system keeps for a connection beside those on their way, where it can be told so: Linux keeps
megabytes, which take long to be noticed as unread."""

UPLOAD_PATH = "/v1/files"
"""The path whose bodies go to files, and not into memory: they may be longer, and take longer."""

UPLOAD_BYTES_PER_SECOND = 64 << 10
"""Rate of the slowest upload: beyond `BODY_SECONDS`, it has a second for as many bytes that have come."""

CONNECTIONS = 2048
"""Connections open at once; more are closed as they come."""

CONNECTIONS_OF_AN_ADDRESS = 1024
"""Connections open at once from the same address; those that come through a proxy are all from one."""

LINGER_SECONDS, LINGER_BYTES = 2.0, 16 << 20
"""How long, and how many bytes of, the rest of a body that was refused is read and dropped before its connection is
closed. Closing with bytes unread resets it, and many a client then sees the reset and not the answer."""

EVENTS_AT_ONCE = 16
"""Parts of requests that are parsed for a connection before others have their turn: headers, and chunks of a body. A
read may have ten thousands of chunks of one byte."""

OPEN_PATHS = frozenset({"/health", "/ready", "/"})

REQUEST_ID = "bigmodel.request_id"
"""Key of a scope for the id of its request."""

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that is being answered, for logs."""

_URL = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<path>.*)", re.IGNORECASE)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")

KEY = "bigmodel.key"
"""Key of a scope for the name of the API key that its request was allowed with.

A request that the server makes itself has it from the start, and no other can.
"""

LATER = "bigmodel.later"
"""Key of a scope for what is added to the priority of its request: those of batches come after those of clients."""

KEPT_SHARE = 0.5
"""Share of a key's limits that requests with `LATER` leave to its others."""


class _PacedConnection(h11.Connection):
    """Needs data, it says, once it has given as many events as are ``left``.

    The target of each request is a path, where it was a whole URL: RFC 9112, 3.2.2. One whose body has two lengths is
    wrong: a proxy before the server may take the other one, and what is behind it for the request of somebody else.
    """

    left = EVENTS_AT_ONCE

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if not self.left:
            return h11.NEED_DATA
        self.left -= 1
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            raise h11.RemoteProtocolError("a body has a length or comes in chunks")
        return _with_path(event)


def _with_path(request: h11.Request) -> h11.Request:
    """The request, its target without scheme and host; that host is then the one that it is for."""
    found = None if request.target.startswith(b"/") else _URL.fullmatch(request.target)
    if found is None:
        return request
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    target = found["path"] if found["path"].startswith(b"/") else b"/" + found["path"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", found["host"]), *headers],
        target=target,
        http_version=request.http_version,
    )


class _PacedFlow(FlowControl):
    """Reads nothing while ``held``."""

    held = False

    def resume_reading(self) -> None:
        if self.held:
            self.read_paused = False  # it is read again once it is held no more
        else:
            super().resume_reading()


class _LingeringTransport:
    """A transport that ``close`` closes for writing only while its client sends the rest of a body: see
    `LINGER_SECONDS`. What comes then is for `dropped`."""

    def __init__(self, transport: asyncio.Transport, sends: Callable[[], bool]) -> None:
        self._transport = transport
        self._sends = sends
        self._left = LINGER_BYTES
        self._end: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def lingers(self) -> bool:
        """Whether it is closed for writing only."""
        return self._end is not None

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._sends() or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._end = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.close)
        self._transport.write_eof()
        self._transport.resume_reading()

    def dropped(self, nbytes: int) -> None:
        """Note bytes that came and are dropped."""
        self._left -= nbytes
        if self._left < 0:
            self._transport.close()

    def stop(self) -> None:
        """Forget the connection: it is lost."""
        if self._end is not None:
            self._end.cancel()


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with deadlines for headers, bodies and readers, and a bound on the number of connections.
    However small the chunks of a body are, other connections have their turns between a few of them."""

    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None  # the deadline of a client that does not read
    _waits_for: Any = None
    _since = 0.0  # when it began to wait for that
    _received = 0  # bytes that have come since

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        most = config.h11_max_incomplete_event_size
        self.conn = self._paced = _PacedConnection(h11.SERVER, HEADER_BYTES if most is None else most)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers; close the connection if there are too many."""
        self._lingering = _LingeringTransport(transport, self._awaits_body)
        transport = cast(asyncio.Transport, self._lingering)
        super().connection_made(transport)
        self.flow = _PacedFlow(transport)
        if len(self.connections) > CONNECTIONS or self._same_address() > CONNECTIONS_OF_AN_ADDRESS:
            transport.abort()
            return
        _keep_little_unsent(transport.get_extra_info("socket"))
        self._watch()

    def handle_events(self) -> None:
        """Take a few events; the next ones, if there are more, when others have had their turns."""
        flow = cast(_PacedFlow, self.flow)
        if flow.held:
            return
        super().handle_events()
        if self._paced.left:
            self._paced.left = EVENTS_AT_ONCE
        elif not self.transport.is_closing():
            flow.held = True
            self.transport.pause_reading()
            self.loop.call_soon(self._handle_more)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and close the connection; whatever is being answered is not answered any more."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._watch_reader()

    def _should_upgrade(self) -> bool:
        return False  # to no other protocol: such requests are answered as if they did not ask for it

    def _handle_more(self) -> None:
        flow = cast(_PacedFlow, self.flow)
        flow.held = False
        if self.transport.is_closing():
            return
        self._paced.left = EVENTS_AT_ONCE
        self.handle_events()
        self._watch()
        if not (flow.held or flow.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()

    def _same_address(self) -> int:
        """Connections from the address of this one; 0 while there are few connections at all."""
        if self.client is None or len(self.connections) <= CONNECTIONS_OF_AN_ADDRESS:
            return 0
        others = (other.client for other in self.connections if isinstance(other, BoundedProtocol))
        return sum(client is not None and client[0] == self.client[0] for client in others)

    def _awaits_body(self) -> bool:
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and begin to wait for the next part of the request."""
        if self._lingering.lingers:
            self._lingering.dropped(len(data))
            return
        super().data_received(data)
        self._received += len(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._lingering.stop()
        self._stop_watching()
        self._stop_watching_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Send no more until the client has read what waits; cut the connection if that takes too long."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Go on: the client has read most of it."""
        super().resume_writing()
        self._stop_watching_reader()
        if self.transport.is_closing():
            self._watch_reader()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request; where there may be none, for the client to read this answer."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, whose next request has not come in time."""
        if not self.transport.is_closing():
            super().timeout_keep_alive_handler()
            self._watch_reader()

    def _watch_reader(self) -> None:
        """Set the deadline of what waits to be read, unless it is set."""
        if self._unread is None:
            seconds = UNREAD_SECONDS + self.transport.get_write_buffer_size() / READ_BYTES_PER_SECOND
            self._unread = self.loop.call_later(seconds, self._left_unread)

    def _stop_watching_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _left_unread(self) -> None:
        self._unread = None
        logger.info("a connection is cut: its client does not read what it was sent")
        self.transport.abort()

    def _watch(self) -> None:
        """Set the deadline of the part of a request that is awaited, unless it is set: more bytes do not move it."""
        state = self.conn.their_state
        if state is self._waits_for:
            return
        self._stop_watching()
        seconds = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(state)
        if seconds is not None:
            self._waits_for = state
            self._since, self._received = self.loop.time(), 0
            self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _stop_watching(self) -> None:
        self._waits_for = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # it is the server that lets the rest of a body wait
            self._stop_watching()
            self._watch()
            return
        left = self._seconds_of_upload() - (self.loop.time() - self._since)
        if left > 0:
            self._deadline = self.loop.call_later(left, self._too_slow)
            return
        if not self.transport.is_closing():
            self.transport.close()
            self._watch_reader()

    def _seconds_of_upload(self) -> float:
        """Time limit of the body that is awaited, by what has come of it; 0 where it is no upload."""
        if self._waits_for is not h11.SEND_BODY or self.scope["path"] != UPLOAD_PATH:
            return 0.0
        return BODY_SECONDS + self._received / UPLOAD_BYTES_PER_SECOND


def _keep_little_unsent(connection: socket.socket | None) -> None:
    """Have the system keep at most `UNSENT_BYTES` for a connection, where it can: one of TCP, on Linux."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if connection is not None and option is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


class RequestIds:
    """Sends each answer with the id of its request: the client's own in ``X-Request-ID``, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        found = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope[REQUEST_ID] = found
        request_id.set(found)

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = found
                if scope["path"].startswith(ANTHROPIC_PATHS):
                    headers["request-id"] = found  # where Anthropic's clients read it
            await send(message)

        await self._app(scope, receive, with_id)


class KeyGuard:
    """401 for requests without one of ``keys``, 429 for those beyond what their key may take in a minute.

    The paths in :data:`OPEN_PATHS` need no key, and only what is posted is counted.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = scope.get(KEY)
        key = self._keys.find(self._given(Headers(scope=scope))) if given is None else self._keys.named(given)
        if key is None:
            error = APIError(
                401,
                "an API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Bearer realm="bigmodel"'},
            )
            await counted(scope["app"], error, scope["path"])(scope, receive, send)
            return
        scope[KEY] = key.name
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._keys.headers(key.name))
            await send(message)

        try:
            self._keys.take_request(key.name, kept=KEPT_SHARE if LATER in scope else 0.0)
        except TooMuchError as found:
            error = APIError(
                429,
                str(found),
                code="rate_limit_exceeded",
                headers={"Retry-After": str(math.ceil(found.seconds))},
            )
            await counted(scope["app"], error, scope["path"])(scope, receive, with_limits)
        else:
            await self._app(scope, receive, with_limits)

    @staticmethod
    def _given(headers: Headers) -> bytes:
        """The key of a request; empty where it has none."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = headers.get("x-api-key", "")  # where Anthropic's clients send it
        return key.strip().encode("latin-1")  # the bytes sent; Starlette decodes headers as Latin-1


class HasBodyLimit(Protocol):
    """Knows the most bytes that a body may have, which may change while the server runs, and those of an upload."""

    @property
    def body_limit(self) -> int: ...

    @property
    def upload_limit(self) -> int: ...


class BodyLimit:
    """413 for bodies longer than ``limits.body_limit``, announced or not; no more than that is ever buffered. 415 for
    compressed ones: how long they are is known once they are decompressed.

    Those of uploads, which are not buffered, may be as long as ``limits.upload_limit``.
    """

    def __init__(self, app: ASGIApp, limits: HasBodyLimit) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limits.upload_limit if scope["path"] == UPLOAD_PATH else self._limits.body_limit
        headers = Headers(scope=scope)
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            why = f"bodies are not decompressed: send this one without 'Content-Encoding: {encoding}'"
            await self._refuse(APIError(415, why, code="unsupported_encoding"), scope, receive, send)
            return
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit:
            error = APIError(413, f"the body is longer than {limit} bytes", code="body_too_long")
            await self._refuse(error, scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise HTTPException(413, f"the body is longer than {limit} bytes")
            return message

        await self._app(scope, limited, send)

    @staticmethod
    async def _refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
        await counted(scope["app"], error, scope["path"])(scope, receive, send)


def client_of(scope: Scope) -> str:
    """Return the name of the client's key, or its address where no key was needed."""
    if KEY in scope:
        return str(scope[KEY])
    address = scope.get("client")
    return str(address[0]) if address else ""


def in_whose_name(scope: Scope) -> str:
    """Return the client in whose turns the engine computes a request; empty for those of batches without a key, which
    come after all clients."""
    return "" if LATER in scope and KEY not in scope else client_of(scope)


class Shares:
    """Turns of clients: at most `each` of one client at once, and `total` of all. For one event loop."""

    def __init__(self, each: int, total: int) -> None:
        self._each = each
        self._free = total
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next client first
        self.ended = 0
        """Turns that have ended."""

    @property
    def idle(self) -> bool:
        """Whether nobody has a turn or waits for one."""
        return not self._held and not self._waiting

    def wanted(self, client: str) -> bool:
        """Whether somebody waits who could begin if a turn of this client ended."""
        return client in self._waiting or any(self._held[one] < self._each for one in self._waiting)

    def take(self, client: str) -> bool:
        """Take a turn if there is one at once."""
        if not self._free or self._held[client] >= self._each or client in self._waiting:
            return False
        self._begin(client)
        return True

    async def wait(self, client: str, seconds: float | None = None) -> None:
        """Take a turn when there is one. Raises TimeoutError when there is none for ``seconds``."""
        if self.take(client):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await asyncio.wait({turn}, timeout=seconds)
        except asyncio.CancelledError:
            if turn.done():
                self.give_back(client)
            else:
                self._forget(client, turn)
            raise
        if not turn.done():
            self._forget(client, turn)
            raise TimeoutError

    def give_back(self, client: str) -> None:
        """End a turn; the request that has waited longest among those allowed to begin has the next."""
        self.ended += 1
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        while self._free:
            following = next((one for one in self._waiting if self._held[one] < self._each), None)
            if following is None:
                return
            turn = self._waiting[following].popleft()
            if self._waiting[following]:
                self._waiting.move_to_end(following)  # clients take turns
            else:
                del self._waiting[following]
            self._begin(following)
            turn.set_result(None)

    def _begin(self, client: str) -> None:
        self._free -= 1
        self._held[client] += 1

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]
