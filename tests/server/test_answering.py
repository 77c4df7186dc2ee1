"""What the engine says is passed on as it comes or in one piece, and what nobody waits for is cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import Response

from bigmodel.server.answering import Joined, failure, respond
from bigmodel.server.engine import Delta, Done, Failed, Request, SamplingParams
from bigmodel.server.errors import APIError
from bigmodel.server.mailbox import Mailbox, Relay


class EngineThatNotes:
    """Notes what is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[Request] = []

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)


class Texts:
    """An answer that is nothing but its texts."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}

    def opening(self) -> bytes:
        return b"<"

    def chunk(self, index: int, delta: Delta) -> bytes:
        return f"{index}{delta.text}".encode()

    def closing(self, done: Done) -> bytes:
        return f">{done.completion_tokens} ".encode()

    def add(self, index: int, delta: Delta) -> None:
        self.texts[index] = self.texts.get(index, "") + delta.text

    def whole(self, done: Done) -> dict[str, Any]:
        return {"texts": self.texts, "tokens": done.completion_tokens}


class Connection:
    """Of a client that stays until it ``left``."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.body = b""

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.body += message.get("body", b"")


class Asked:
    """Two engine requests of two choices each, which one HTTP request became."""

    def __init__(self) -> None:
        self.engine = EngineThatNotes()
        self.mailbox = Mailbox(Relay(asyncio.get_running_loop()))
        self.slots = [self.mailbox.slot(number) for number in range(2)]
        self.requests = [Request(str(n), [1], SamplingParams(3), slot, n=2) for n, slot in enumerate(self.slots)]
        self.connection = Connection()

    async def respond(self, *, stream: bool) -> Response:
        joined = Joined(self.engine, self.requests, self.mailbox)  # type: ignore[arg-type]
        return await respond(self.connection, joined, Texts(), stream=stream)  # type: ignore[arg-type]

    def say(self) -> None:
        """All that the engine says, in the order of a step after the other."""
        for index, text in ((0, "a"), (1, "b")):
            for slot in self.slots:
                slot.put(Delta(index, text))
        for slot in self.slots:
            slot.put(Done(1, 2, 0))


@pytest.mark.anyio
async def test_a_whole_answer_numbers_the_choices_through_and_adds_the_tokens_up() -> None:
    asked = Asked()
    asked.say()
    answer = await asked.respond(stream=False)
    assert json.loads(bytes(answer.body)) == {"texts": {"0": "a", "2": "a", "1": "b", "3": "b"}, "tokens": 4}
    assert asked.engine.cancelled == []


@pytest.mark.anyio
async def test_a_stream_is_opened_filled_and_closed() -> None:
    asked = Asked()
    asked.say()
    answer = await asked.respond(stream=True)
    await answer({"type": "http"}, asked.connection.receive, asked.connection.send)
    assert asked.connection.body == b"<0a2a1b3b>4 data: [DONE]\n\n"
    assert asked.engine.cancelled == []


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_for_a_client_that_left_everything_is_cancelled(stream: bool) -> None:
    asked = Asked()
    asked.connection.left.set()
    answer = await asked.respond(stream=stream)
    if stream:
        await answer({"type": "http"}, asked.connection.receive, asked.connection.send)
    else:
        assert answer.status_code == 499
    assert asked.engine.cancelled == asked.requests


@pytest.mark.anyio
async def test_a_failure_ends_the_other_request_too() -> None:
    asked = Asked()
    asked.slots[0].put(Failed("timeout", "too late"))
    with pytest.raises(APIError, match="too late"):
        await asked.respond(stream=False)
    assert asked.engine.cancelled == [asked.requests[1]]


@pytest.mark.anyio
async def test_a_failure_is_the_last_event_of_a_stream() -> None:
    asked = Asked()
    asked.slots[0].put(Failed("engine", "it broke"))
    answer = await asked.respond(stream=True)
    await answer({"type": "http"}, asked.connection.receive, asked.connection.send)
    assert json.loads(asked.connection.body.removeprefix(b"<data: "))["error"]["message"] == "it broke"


def test_a_timeout_is_told_from_a_failure() -> None:
    assert [
        (error.status, error.code) for error in (failure(Failed("timeout", "")), failure(Failed("engine", "")))
    ] == [
        (504, "timeout"),
        (500, "engine_failed"),
    ]
