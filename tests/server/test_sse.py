"""Events reach the client as they are made; when it leaves, the work ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from bigmodel.server.sse import ClientGoneError, EventStream, event, unless_disconnected

Message = MutableMapping[str, Any]


class Client:
    """The other end of a connection: keeps what it is sent, and leaves when told to."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_an_event_is_one_line_of_data() -> None:
    assert event('{"a": "ö"}') == 'data: {"a": "ö"}\n\n'.encode()


@pytest.mark.anyio
async def test_chunks_are_sent_one_by_one_and_then_released() -> None:
    client, released = Client(), []

    async def chunks() -> AsyncIterator[bytes]:
        yield event("1")
        yield event("2")

    await EventStream(chunks(), lambda: released.append(True))({}, client.receive, client.send)
    first, *_, last = client.sent
    assert (b"content-type", b"text/event-stream; charset=utf-8") in first["headers"]
    assert client.body == b"data: 1\n\ndata: 2\n\n"
    assert last == {"type": "http.response.body", "body": b"", "more_body": False}
    assert released == [True]


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_the_stream() -> None:
    client, released, ended = Client(), [], []

    async def chunks() -> AsyncIterator[bytes]:
        try:
            while True:
                yield event("more")
                client.left.set()
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    await EventStream(chunks(), lambda: released.append(True))({}, client.receive, client.send)
    assert (released, ended) == ([True], [True])


@pytest.mark.anyio
async def test_a_stream_that_fails_is_released_and_raises() -> None:
    client, released = Client(), []

    async def chunks() -> AsyncIterator[bytes]:
        yield event("1")
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await EventStream(chunks(), lambda: released.append(True))({}, client.receive, client.send)
    assert released == [True]


@pytest.mark.anyio
async def test_work_is_waited_for_while_the_client_stays() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    assert await unless_disconnected(Client().receive, work()) == "done"


@pytest.mark.anyio
async def test_work_for_a_client_that_left_is_cancelled() -> None:
    client, cancelled = Client(), []

    async def work() -> None:
        client.left.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ClientGoneError):
        await unless_disconnected(client.receive, work())
    assert cancelled == [True]
