"""Events cross to the event loop in order and reach the client; a client that leaves ends the work."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
from starlette.responses import Response

import bigmodel.server.http.respond
from bigmodel.server.answers.sse import event
from bigmodel.server.engine import Delta, Done, Failed, Request, SamplingParams
from bigmodel.server.engine.scheduling.request import TokenLogprob
from bigmodel.server.http.errors import APIError
from bigmodel.server.http.respond import (
    AT_ONCE,
    ClientGoneError,
    EventStream,
    JoinedRequests,
    Mailbox,
    Relay,
    failure,
    respond,
    unless_disconnected,
)


class EngineThatNotes:
    """Notes what is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[Request] = []

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)


class Texts:
    """An answer that is nothing but its texts."""

    alive = b"."

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.threads: list[bool] = []  # whether each part was written in the thread of the event loop

    def _note_thread(self) -> None:
        self.threads.append(threading.current_thread() is threading.main_thread())

    def opening(self) -> bytes:
        return b"<"

    def chunk(self, index: int, delta: Delta) -> bytes:
        self._note_thread()
        return f"{index}{delta.text}".encode()

    def closing(self, done: Done) -> bytes:
        return f">{done.completion_tokens}".encode()

    def failed(self, status: int, error: dict[str, Any]) -> bytes:
        return event(json.dumps({"error": error, "status": status}))

    def add(self, index: int, delta: Delta) -> None:
        self._note_thread()
        self.texts[index] = self.texts.get(index, "") + delta.text

    def whole(self, done: Done) -> bytes:
        self._note_thread()
        return json.dumps({"texts": self.texts, "tokens": done.completion_tokens}).encode()


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
        self.sinks = [self.mailbox.sink(number) for number in range(2)]
        self.requests = [Request(str(n), [1], SamplingParams(3), sink, n=2) for n, sink in enumerate(self.sinks)]
        self.connection = Connection()

    async def respond(self, *, stream: bool, answer: Texts | None = None) -> Response:
        joined = JoinedRequests(self.engine, self.requests, self.mailbox)  # type: ignore[arg-type]
        return await respond(self.connection, joined, answer or Texts(), stream=stream)  # type: ignore[arg-type]

    def say(self) -> None:
        """All that the engine says, in the order of a step after the other."""
        for index, text in ((0, "a"), (1, "b")):
            for sink in self.sinks:
                sink.put(Delta(index, text))
        for sink in self.sinks:
            sink.put(Done(1, 2, 0))


_ONE = TokenLogprob(1, -1.0, ((1, -1.0),) * 20)


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("delta", "in_loop"),
    [
        (Delta(0, "a", (1,) * AT_ONCE), False),  # and the prompts
        (Delta(0, "a", (1,), (_ONE,) * 100), False),
        (Delta(0, "a", (1,), (), (None, *[_ONE] * 100)), False),
        (Delta(0, "a", (1,), (_ONE,), (None,)), True),
    ],
)
async def test_large_answers_are_written_beside_the_event_loop(delta: Delta, in_loop: bool, stream: bool) -> None:
    asked, answer = Asked(), Texts()
    asked.sinks[0].put(delta)
    for sink in asked.sinks:
        sink.put(Done(1, 2, 0))
    response = await asked.respond(stream=stream, answer=answer)
    if stream:
        await response({"type": "http"}, asked.connection.receive, asked.connection.send)
    assert set(answer.threads) == {in_loop}
    assert asked.connection.body == (b"<0a>4" if stream else b"")


@pytest.mark.anyio
async def test_a_whole_answer_numbers_choices_across_prompts_and_sums_tokens() -> None:
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
    assert asked.connection.body == b"<0a2a1b3b>4"
    assert asked.engine.cancelled == []


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_all_requests_of_a_disconnected_client_are_cancelled(stream: bool) -> None:
    asked = Asked()
    asked.connection.left.set()
    answer = await asked.respond(stream=stream)
    if stream:
        await answer({"type": "http"}, asked.connection.receive, asked.connection.send)
    else:
        assert answer.status_code == 499
    assert asked.engine.cancelled == asked.requests


@pytest.mark.anyio
async def test_a_failure_cancels_the_other_requests_of_the_body() -> None:
    asked = Asked()
    asked.sinks[0].put(Failed("timeout", "too late"))
    with pytest.raises(APIError, match="too late"):
        await asked.respond(stream=False)
    assert asked.engine.cancelled == [asked.requests[1]]


@pytest.mark.anyio
async def test_a_failure_is_the_last_event_of_a_stream() -> None:
    asked = Asked()
    asked.sinks[0].put(Failed("engine", "it broke"))
    answer = await asked.respond(stream=True)
    await answer({"type": "http"}, asked.connection.receive, asked.connection.send)
    assert json.loads(asked.connection.body.removeprefix(b"<data: "))["error"]["message"] == "it broke"


def test_a_timeout_and_a_lost_node_have_other_statuses_than_a_failure() -> None:
    kinds = ("timeout", "engine", "node_lost")
    assert [(error.status, error.code) for error in (failure(Failed(kind, "")) for kind in kinds)] == [
        (504, "timeout"),
        (500, "engine_failed"),
        (503, "node_lost"),
    ]


def test_events_of_many_threads_arrive_whole_and_in_order() -> None:
    async def collect() -> list[list[int]]:
        relay = Relay(asyncio.get_running_loop())
        boxes = [Mailbox(relay) for _ in range(4)]

        def work(box: Mailbox) -> None:
            sink = box.sink(3)
            for number in range(500):
                sink.put(Delta(number, "x"))
            sink.put(Done(1, 500, 0))

        threads = [threading.Thread(target=work, args=(box,)) for box in boxes]
        for thread in threads:
            thread.start()
        seen: list[list[int]] = []
        for box in boxes:
            got: list[int] = []
            while 3 not in box.finished or len(got) < 500:
                got += [event.index for number, event in await box.take() if isinstance(event, Delta) and number == 3]
            seen.append(got)
        for thread in threads:
            thread.join()
        return seen

    assert asyncio.run(collect()) == [list(range(500))] * 4


def test_a_burst_wakes_the_loop_once() -> None:
    async def count() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        calls = []
        plain = loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            calls.append(arguments)
            return plain(*arguments)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        box = Mailbox(Relay(loop))
        for number in range(100):
            box.sink(0).put(Delta(number, "x"))
        return len(calls), len(await box.take())

    assert asyncio.run(count()) == (1, 100)


def test_events_for_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    relay = Relay(loop)

    async def make() -> Mailbox:
        return Mailbox(relay)

    box = loop.run_until_complete(make())
    loop.close()
    for _ in range(3):
        box.sink(0).put(Done(0, 0, 0))
        assert relay.undelivered == 0


def test_events_of_an_unstreamed_answer_arrive_together() -> None:
    async def collect() -> tuple[bool, list[object]]:
        box = Mailbox(Relay(asyncio.get_running_loop()), at_once=True)
        first, second = box.sink(0), box.sink(1)
        first.put(Delta(0, "a"))
        second.put(Delta(0, "b"))
        await asyncio.sleep(0)
        taking = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        early = taking.done()
        first.put(Done(1, 1, 0))
        return early, [(number, type(event)) for number, event in await taking]

    assert asyncio.run(collect()) == (False, [(0, Delta), (0, Done)])


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
async def test_a_silent_stream_says_that_it_is_alive_and_nothing_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigmodel.server.http.respond, "ALIVE_SECONDS", 0.01)
    client, heard = Client(), asyncio.Event()

    async def send(message: Any) -> None:
        await client.send(message)
        if client.body.count(b": waiting") == 2:
            heard.set()

    async def chunks() -> AsyncIterator[bytes]:
        yield event("1")
        await heard.wait()
        yield b""  # an answer that holds its text back is as silent
        yield event("2")

    await EventStream(chunks(), lambda: None)({}, client.receive, send)
    await asyncio.sleep(0.03)
    assert client.body == b"data: 1\n\n" + b": waiting\n\n" * 2 + b"data: 2\n\n"
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.anyio
async def test_a_stream_with_something_to_say_says_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigmodel.server.http.respond, "ALIVE_SECONDS", 5.0)
    client = Client()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield event("1")
            await asyncio.sleep(0)

    await EventStream(chunks(), lambda: None)({}, client.receive, client.send)
    assert client.body == b"data: 1\n\n" * 50


@pytest.mark.anyio
async def test_an_answer_says_how_it_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigmodel.server.http.respond, "ALIVE_SECONDS", 0.01)
    asked = Asked()
    answer = await asked.respond(stream=True)
    sending = asyncio.ensure_future(answer({"type": "http"}, asked.connection.receive, asked.connection.send))
    while b"." not in asked.connection.body:
        await asyncio.sleep(0.005)
    asked.say()
    await sending
    assert asked.connection.body.replace(b".", b"") == b"<0a2a1b3b>4"


@pytest.mark.anyio
async def test_a_disconnected_client_ends_the_stream() -> None:
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
async def test_work_is_awaited_while_the_client_is_connected() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "done"

    assert await unless_disconnected(Client().receive, work()) == "done"


@pytest.mark.anyio
async def test_work_for_a_disconnected_client_is_cancelled() -> None:
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


@pytest.mark.anyio
async def test_a_wait_that_is_cancelled_twice_leaves_no_task() -> None:
    async def never() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)

    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(unless_disconnected(never, slow_to_end()))
    for _ in range(2):  # as a worker of a batch is: with what it belongs to, and then itself
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before
